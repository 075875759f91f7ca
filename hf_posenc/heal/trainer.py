"""heal(): train an adapter until the converted model computes again what it computed before."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from hf_posenc.errors import PosencError
from hf_posenc.files import staged_directory, write_text
from hf_posenc.heal.adapter import (
    attach_adapter,
    parameter_groups,
    settle_adapter,
    trainable_parameters,
)
from hf_posenc.heal.base import save_beside_base, saved_base
from hf_posenc.heal.checks import check_calibrated, check_model, check_request
from hf_posenc.heal.config import Recipe
from hf_posenc.heal.data import PackedRows, Row, collate, heldout_rows
from hf_posenc.heal.gentle import Transition
from hf_posenc.heal.objective import Objective
from hf_posenc.heal.progress import HeldOut, Progress, heldout_log, training_log
from hf_posenc.heal.record import HealRecord
from hf_posenc.heal.resume import claimed_folder, finished_record, last_checkpoint
from hf_posenc.heal.sections import HealSection
from hf_posenc.provenance import collect
from hf_posenc.runtime.install import installation_of, retabled
from hf_posenc.runtime.patch import get_plan, patch_model
from hf_posenc.sources import load_pretrained, load_tokenizer

Variant = Literal["healed", "control"]


class HealTrainer(Trainer):
    """transformers' Trainer with the healing loss, averaged over the tokens of a whole step.

    The mean is over all predicted tokens of all accumulated batches and processes, so a step does
    not depend on how its rows were split. A loss that is not finite stops the run.
    The tables of a `transition` are on within a step only: what is measured, saved or left behind
    by an error runs the plan.
    """

    def __init__(
        self,
        *,
        model: PeftModel,
        objective: Objective,
        transition: Transition | None,
        rows: PackedRows,
        heldout: Sequence[Row],
        heal: HealSection,
        args: TrainingArguments,
        progress: Progress,
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=rows, data_collator=collate)
        self.healing = model
        self.objective: Objective = objective
        self.first = None if heal.first is None else objective.weighted(heal.first.objective)
        self.transition = transition
        self.heldout = heldout
        self.heal = heal
        self.progress = progress
        # The loss below takes num_items_in_batch itself; the Trainer is to count it.
        self.model_accepts_loss_kwargs = True
        self.remove_callback(PrinterCallback)
        self.add_callback(progress)
        if heldout:
            self.add_callback(HeldOut(self.measure_heldout, every=heal.heldout_every))

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        if self.transition is None:
            return super().training_step(model, inputs, num_items_in_batch)
        progress = (self.state.global_step + 1) / self.state.max_steps
        with retabled(self.healing, self.transition.at(progress)):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Row,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        if num_items_in_batch is None:
            raise RuntimeError("the Trainer did not count the predicted tokens of the step")
        loss = self._current_objective(model, inputs) / num_items_in_batch
        return loss * self.accelerator.num_processes

    @property
    def _current_objective(self) -> Objective:
        if self.first is None or self.heal.first is None:
            return self.objective
        first_steps = round(self.heal.first.share * self.state.max_steps)
        return self.first if self.state.global_step < first_steps else self.objective

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = parameter_groups(
                model or self.model,  # type: ignore[arg-type]
                lr=self.args.learning_rate,
                bias_lr_multiplier=self.heal.bias_lr_multiplier,
            )
            self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self._require_finite("loss", logs["loss"])
            logs = {
                "tokens": self.tokens_seen,
                "loss": logs["loss"],
                "lr": logs["learning_rate"],
                "grad_norm": logs["grad_norm"],
                "seconds": round(self.progress.seconds, 3),
            }
        super().log(logs, start_time)

    def measure_heldout(self) -> None:
        """Note the next-token loss of the model as it stands on the held-out rows."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.heldout), self.args.per_device_train_batch_size):
            rows = self.heldout[start : start + self.args.per_device_train_batch_size]
            loss, count = self.objective.cross_entropy(self._prepare_inputs(collate(rows)))
            total, tokens = total + loss, tokens + count
        self._require_finite("held-out loss", total)
        # Not through log(): that tells the Trainer that the current step has been logged.
        self.state.log_history.append(
            {
                "step": self.state.global_step,
                "tokens": self.tokens_seen,
                "heldout_loss": total / tokens,
                "heldout_n_tokens": tokens,
            }
        )

    @property
    def tokens_seen(self) -> int:
        """Tokens of all rows of all steps so far, over all processes."""
        args = self.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return self.state.global_step * rows * self.train_dataset.data.row_tokens  # type: ignore[union-attr]

    def _require_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise PosencError(
                f"the {name} is {value} at step {self.state.global_step}: healing stopped and "
                "nothing was written; lower heal.lr, or use dtype float32"
            )

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        # The Trainer's own saving asks the hub whether the embeddings were resized.
        folder = str(output_dir or self.args.output_dir)
        self.healing.save_pretrained(folder, state_dict=state_dict, save_embedding_layers=False)


def heal(
    recipe: Recipe,
    *,
    out: Path | str,
    model: Any = None,
    tokenizer: Any = None,
    variant: Variant = "healed",
) -> HealRecord:
    """Heal the recipe's model and write the adapter with its records to the folder `out`.

    model      the converted model (variant "healed") or the unconverted one ("control"); changed
               in place: it carries the adapter afterwards. None: loaded and converted here,
               with the recipe's calibration; a scheme that needs one is refused without it.
               A base that is not on disk yet is saved in `out`/base
    tokenizer  None: the recipe's model's
    out        adapter/, heal.json, log.jsonl, loss.png, recipe.yaml; appears when all is done.
               Until then it holds checkpoints/, from which the same call goes on after a kill.
               A finished run of the same recipe is read back instead of repeated.
    Errors: `PosencError` with nothing half-written.
    """
    out = Path(out)
    check_request(recipe, variant)
    if (finished := finished_record(out, recipe, variant)) is not None:
        return finished
    if model is None and variant == "healed":
        check_calibrated(recipe)
    tokenizer = load_tokenizer(recipe.model) if tokenizer is None else tokenizer
    rows = PackedRows(recipe.data, tokenizer, seed=recipe.seed)
    next(iter(rows))  # a text that is too short is found before anything is loaded
    heldout = heldout_rows(recipe.data, tokenizer, count=recipe.heal.heldout_rows)
    model = _load(recipe, variant) if model is None else model
    check_model(model, recipe, variant)

    with claimed_folder(out, recipe, variant) as checkpoints:
        base = saved_base(model, tokenizer, checkpoints)
        trainer = _trainer(model, recipe, variant, rows, heldout, checkpoints)
        try:
            trainer.train(resume_from_checkpoint=last_checkpoint(checkpoints))
        finally:
            trainer.progress.close()
        settle_adapter(trainer.healing)
        record = _record(trainer, recipe, variant)
        with staged_directory(out, overwrite=True) as stage:
            save_beside_base(trainer.healing, base, stage, out)
            record.write(stage)
            write_text(stage / "recipe.yaml", recipe.to_yaml())
    return record


def _trainer(
    model: Any,
    recipe: Recipe,
    variant: Variant,
    rows: PackedRows,
    heldout: Sequence[Row],
    checkpoints: Path,
) -> HealTrainer:
    transition = _transition(model, recipe)
    set_seed(recipe.seed)
    healing = attach_adapter(model, recipe.lora, train_norms=recipe.heal.train_norms)
    if recipe.heal.gradient_checkpointing:
        healing.enable_input_require_grads()  # the embeddings are frozen
    layers = recipe.heal.hidden_layers
    objective = Objective(
        healing, recipe.heal.objective, hidden_layers=None if layers == "all" else layers
    )
    progress = Progress(
        label=f"healing {recipe.name}" if variant == "healed" else f"control of {recipe.name}",
        tokens_per_step=recipe.tokens_per_step,
        live_log=checkpoints / "log.jsonl",
    )
    return HealTrainer(
        model=healing,
        objective=objective,
        transition=transition,
        rows=rows,
        heldout=heldout,
        heal=recipe.heal,
        args=_arguments(recipe, checkpoints),
        progress=progress,
    )


def _transition(model: Any, recipe: Recipe) -> Transition | None:
    installed = installation_of(model)
    if recipe.heal.gentle is None or installed is None:  # the control has no plan to come in
        return None
    return Transition.of(installed.plan, installed.spec.layers, recipe.heal.gentle)


def _record(trainer: HealTrainer, recipe: Recipe, variant: Variant) -> HealRecord:
    plan = get_plan(trainer.healing)
    heal = recipe.heal
    gentle = None if trainer.transition is None else heal.gentle
    history = trainer.state.log_history
    return HealRecord(
        variant=variant,
        model=recipe.model,
        scheme=None if plan is None else plan.scheme_dict,
        plan_digest=None if plan is None else plan.digest,
        recipe_digest=recipe.digest,
        objective={str(name): weight for name, weight in recipe.heal.objective.items()},
        first=None if heal.first is None else heal.first.model_dump(mode="json"),
        gentle=None if gentle is None else gentle.model_dump(mode="json"),
        full=recipe.lora.full,
        tokens=trainer.tokens_seen,
        steps=trainer.state.global_step,
        seed=recipe.seed,
        seconds=trainer.progress.seconds,
        tokens_per_second=trainer.tokens_seen / trainer.progress.seconds,
        peak_memory_bytes=peak_memory_bytes(),
        trainable_parameters=trainable_parameters(trainer.healing),
        log=training_log(history),
        heldout=heldout_log(history),
        provenance=collect(seed=recipe.seed, tokens=trainer.tokens_seen),
    )


def peak_memory_bytes() -> int:
    """Most memory held so far: of the accelerator when there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _load(recipe: Recipe, variant: str) -> Any:
    model = load_pretrained(recipe.model, dtype=recipe.dtype)
    if variant == "control":
        return model
    return patch_model(model, recipe.scheme, calibration=recipe.calibration)


def _arguments(recipe: Recipe, checkpoints: Path) -> TrainingArguments:
    heal = recipe.heal
    return TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=recipe.steps,
        per_device_train_batch_size=heal.rows,
        gradient_accumulation_steps=heal.gradient_accumulation,
        learning_rate=heal.lr,
        lr_scheduler_type=heal.schedule,
        warmup_steps=heal.warmup,
        activation_checkpointing=bool(heal.gradient_checkpointing),
        activation_checkpointing_kwargs={
            "use_reentrant": heal.gradient_checkpointing == "reentrant"
        },
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps" if heal.save_steps else "no",
        save_steps=heal.save_steps or 1,
        save_total_limit=2,
        seed=recipe.seed,
        data_seed=recipe.seed,
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    )
