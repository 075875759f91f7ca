"""`evaluate` end to end on tiny models: names, limits, scores, records, and what it refuses."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from evaluation_case import Oracle, tiny_config, tiny_model
from lm_eval.tasks import TaskManager
from tiny_tokenizer import tiny_text, tiny_tokenizer

import hf_posenc
from hf_posenc import resources
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import EvalRecord, Score, evaluate, load
from hf_posenc.evaluation.statistics import mean_and_stderr, parse_bin_metric, position_bins
from hf_posenc.evaluation.suites import LENGTHS, SUITES, plan_tasks
from hf_posenc.evaluation.tasks import KINDS, copy_results, needle_results
from hf_posenc.evaluation.texts import ESSAYS, FALLBACK, load_text, resolve_source, split_words


@pytest.fixture(scope="module", autouse=True)
def _small_lm_eval(tmp_path_factory):
    """Spare what takes lm-eval seconds: its own index of 13,000 files, a report on the system."""
    folder = tmp_path_factory.mktemp("lm_eval_tasks")
    (folder / "hellaswag.yaml").write_text("task: hellaswag\noutput_type: multiple_choice\n")
    metadata = {"tokenizer": None}
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
        patch.setattr(load, "_lm_eval_manager", lambda: (manager, metadata))
        yield


@pytest.mark.slow
def test_lm_evals_real_index_knows_its_tasks(monkeypatch):
    monkeypatch.undo()
    metadata = {"tokenizer": None}
    manager = TaskManager(metadata=metadata)
    monkeypatch.setattr(load, "_lm_eval_manager", lambda: (manager, metadata))
    load.check_foreign(["hellaswag", "mmlu", "niah_single_1"])
    with pytest.raises(PosencError, match="did you mean 'hellaswag'"):
        load.check_foreign(["hellaswga"])
    # None of ours hides one of theirs.
    ours = {*KINDS, *SUITES, *(f"{kind}_{length}" for kind in KINDS for length in LENGTHS)}
    assert not ours & set(manager.all_tasks)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    path.write_text(tiny_text(6000), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def record(model, text_file) -> EvalRecord:
    return evaluate(
        model,
        tiny_tokenizer(),
        list(KINDS),
        lengths=[300, 400],
        limit=9,
        texts=text_file,
        variant="stock",
    )


def values(record: EvalRecord) -> dict:
    return {(s.task, s.metric, s.length, s.bin): s.value for s in record.scores}


def test_every_score_has_its_error_and_its_count(record):
    assert {s.task for s in record.scores} == set(KINDS)
    assert {s.length for s in record.scores} == {300, 400}
    for score in record.scores:
        assert score.n == 9
        assert score.stderr is not None and math.isfinite(score.stderr)
        assert score.clusters == (2 if score.task == "niah_essay" else 9)
        assert score.unit == ("nats/token" if score.metric == "nll" else "fraction")
        assert score.higher_is_better is (score.metric != "nll")
    metrics = {(s.task, s.metric) for s in record.scores}
    assert ("niah_essay", "acc") in metrics and ("niah_single", "acc") not in metrics
    bins = [s.bin for s in record.scores if (s.task, s.length) == ("ppl_bins", 400)]
    assert bins == [None, (0, 128), (128, 256), (256, 400)]


def test_needles_are_kept_one_by_one(record):
    for task in ("niah_single", "niah_essay"):
        for length in (300, 400):
            rows = [n for n in record.needles if (n.task, n.length) == (task, length)]
            assert len(rows) == 9
            assert all(0 <= row.depth <= 1 for row in rows)
            assert record.score(task, "em", length=length).value == pytest.approx(
                sum(row.em for row in rows) / 9
            )
            nlls = [row.nll for row in rows]
            stderr = mean_and_stderr(nlls, [row.haystack for row in rows])[1]
            assert record.score(task, "nll", length=length).stderr == pytest.approx(stderr)


def test_a_smaller_limit_or_another_order_changes_no_document(model, record, text_file):
    few = evaluate(
        model,
        tiny_tokenizer(),
        ["niah_essay", "copytext", "niah_single"],
        lengths=[400],
        limit=3,
        texts=text_file,
    )
    assert [n for n in record.needles if n.length == 400 and n.task == "niah_essay"][:3] == [
        n for n in few.needles if n.task == "niah_essay"
    ]
    assert [n for n in record.needles if n.length == 400 and n.task == "niah_single"][:3] == [
        n for n in few.needles if n.task == "niah_single"
    ]


def test_ppl_bins_equal_a_direct_forward(model, record, text_file):
    tokenizer = tiny_tokenizer()
    remaining = split_words(load_text(text_file, "heldout").text)
    losses: dict[tuple[int, int] | None, list[float]] = {}
    for _ in range(9):
        size = 60  # certainly fits
        while len(tokenizer("".join(remaining[: size + 1]).rstrip()).input_ids) <= 400:
            size += 1
        text = "".join(remaining[:size]).rstrip()
        remaining = remaining[size:]
        row = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            logits = model(row).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")
        first = len(tokenizer(text.split()[0]).input_ids)
        for low, high in [(0, 128), (128, 256), (256, 400)]:
            # loss[i] is that of the token at position i + 1
            part = loss[max(low, first) - 1 : high - 1]
            losses.setdefault((low, high), []).append(part.mean().item())
        losses.setdefault(None, []).append(loss[first - 1 :].mean().item())
    for bounds, windows in losses.items():
        score = record.score("ppl_bins", "nll", length=400, bin=bounds)
        assert score.value == pytest.approx(sum(windows) / 9, abs=1e-5)
        assert score.stderr == pytest.approx(torch.tensor(windows).std().item() / 3, rel=1e-3)


@pytest.mark.parametrize(("wrong", "em"), [(False, 1.0), (True, 0.0)])
def test_golden_answers_score_one_and_wrong_ones_zero(wrong, em, text_file):
    tokenizer = tiny_tokenizer()
    oracle = Oracle(tiny_config()).attach(tokenizer, wrong=wrong)
    record = evaluate(
        oracle,
        tokenizer,
        ["niah_single", "niah_essay"],
        lengths=[400],
        limit=8,
        texts=text_file,
        prefix_cache=False,
    )
    for task in ("niah_single", "niah_essay"):
        assert record.score(task, "em", length=400).value == em
        assert record.score(task, "em_strict", length=400).value == em
        assert (record.score(task, "nll", length=400).value < 0.01) is not wrong
    assert (record.score("niah_essay", "acc", length=400).value == 1.0) is not wrong


def test_value_em_forgives_the_white_space_before_the_value():
    from hf_posenc.evaluation.answer import Answer

    doc = {"lead": 1}
    late = Answer([-3.0, -0.1], [False, True])
    assert needle_results(doc, [late])["em"] == 1.0
    assert needle_results(doc, [late])["em_strict"] == 0.0
    assert needle_results({"lead": 0}, [late])["em"] == 0.0
    assert needle_results(doc, [late])["nll"] == pytest.approx(1.55)
    # A tie is not a choice.
    assert needle_results(doc, [late, late])["acc"] == 0.0
    assert copy_results(doc, [late]) == {"nll": pytest.approx(0.1), "acc": 1.0}


def test_plain_lm_eval_models_are_told_what_is_missing():
    with pytest.raises(PosencError, match="--model hf-posenc"):
        needle_results({"lead": 0}, [(-1.0, True)])


def test_a_patched_model_is_scored_as_patched(model, record, text_file, tmp_path):
    patched = hf_posenc.patch_model(tiny_model(), "nope_interleaved", every=2)
    out = tmp_path / "eval" / "converted.json"
    converted = evaluate(
        patched,
        tiny_tokenizer(),
        "copytext_400",
        limit=9,
        texts=text_file,
        variant="converted",
        out=out,
    )
    key = ("copytext", "nll", 400, None)
    assert abs(values(converted)[key] - values(record)[key]) > 0.01
    assert converted.scheme is not None and converted.scheme["name"] == "nope_interleaved"
    assert converted.plan_digest == hf_posenc.get_plan(patched).digest
    assert record.scheme is None and record.plan_digest is None
    assert EvalRecord.read(out) == converted
    body = json.loads(out.read_text())
    assert (body["schema"], body["kind"], body["variant"]) == (1, "eval", "converted")
    assert body["data"] == {f"{text_file}[heldout]": load_text(text_file, "heldout").sha256}
    assert body["provenance"]["seed"] == 0
    assert "prompt" not in out.read_text()
    assert [p.name for p in out.parent.iterdir()] == ["converted.json"]


def test_two_models_in_one_process_are_both_run(model, text_file, monkeypatch, tmp_path):
    """lm-eval's response cache would hand the second model the first one's scores."""
    monkeypatch.setenv("LM_HARNESS_CACHE_PATH", str(tmp_path))
    runs = [
        evaluate(m, tiny_tokenizer(), "copytext_300", limit=2, texts=text_file)
        for m in (model, tiny_model(seed=1), model)
    ]
    assert values(runs[0]) == values(runs[2])
    assert values(runs[0]) != values(runs[1])
    assert all(run.cost["tokens_computed"] > 0 for run in runs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("training", [True, False])
def test_a_live_model_keeps_its_mode_and_the_process_its_seeds(training, text_file):
    model = tiny_model().train(training)
    torch.manual_seed(7)
    random.seed(7)
    expected = (torch.get_rng_state(), random.getstate())
    evaluate(model, tiny_tokenizer(), "copytext_300", limit=1, texts=text_file)
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), expected[0]) and random.getstate() == expected[1]


def test_a_model_from_a_folder_scores_as_the_live_one(model, record, text_file, tmp_path):
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = evaluate(str(tmp_path), tasks="copytext", lengths=[400], limit=9, texts=text_file)
    key = ("copytext", "nll", 400, None)
    assert values(loaded)[key] == pytest.approx(values(record)[key], abs=1e-6)
    assert loaded.model == tmp_path.name


def test_a_healed_adapter_scores_alike_live_and_from_its_folder(text_file, tmp_path):
    from peft import LoraConfig, get_peft_model

    from hf_posenc.checkpoint.io import save_converted

    patched = hf_posenc.patch_model(tiny_model(), "nope_interleaved", every=2)
    save_converted(patched, tiny_tokenizer(), tmp_path / "converted", source="owner/tiny")
    base = hf_posenc.load_model(tmp_path / "converted")
    torch.manual_seed(0)
    adapted = get_peft_model(
        base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    hf_posenc.save_adapter(adapted, tmp_path / "adapter", base=tmp_path / "converted")
    options = {"tasks": "copytext_300", "limit": 3, "texts": text_file}
    live = evaluate(adapted, tiny_tokenizer(), **options)
    loaded = evaluate(str(tmp_path / "adapter"), **options)
    key = ("copytext", "nll", 300, None)
    assert values(loaded)[key] == pytest.approx(values(live)[key], abs=1e-6)
    converted = evaluate(str(tmp_path / "converted"), **options)
    assert abs(values(converted)[key] - values(live)[key]) > 0.01
    assert loaded.adapter == str(tmp_path / "adapter")
    assert live.plan_digest == loaded.plan_digest == converted.plan_digest is not None


FOREIGN = """
task: tiny_choice
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: question
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def test_lm_evals_own_tasks_run_by_the_same_call(model, text_file, tmp_path, monkeypatch):
    rows = [{"question": f"The {i}", "choices": ["red", "blue"], "label": i % 2} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    task = tmp_path / "tiny_choice.yaml"
    task.write_text(FOREIGN.format(file=data))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    record = evaluate(
        model, tiny_tokenizer(), ["copytext_300", str(task)], limit=4, texts=text_file
    )
    score = record.score("tiny_choice", "acc")
    assert score.n == 4 and score.stderr is not None and score.higher_is_better is True
    assert {s.task for s in record.scores} == {"copytext", "tiny_choice"}


class Unloadable:
    """A model that must not be reached."""

    config = tiny_config()
    training = False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "niah_esay"}, "unknown task 'niah_esay'.*did you mean 'niah_essay'"),
        ({"tasks": "hellaswga"}, "did you mean 'hellaswag'"),
        ({"tasks": "quick"}, "2048 exceeds the model's 1024"),
        ({"tasks": "niah_essay_2048"}, "2048 exceeds the model's 1024"),
        ({"tasks": "copytext", "lengths": [512, 4096]}, r"4096 exceeds.*lengths=\[512\]"),
        ({"tasks": "niah_essay", "lengths": [100]}, "too short for 8 needle"),
        ({"tasks": "quick", "lengths": [512]}, "suite 'quick' has nothing at length 512"),
        ({"tasks": "copytext", "lengths": []}, "lengths"),
        ({"tasks": "copytext", "limit": 0}, "limit 0"),
        ({"tasks": ""}, "no tasks"),
        ({"tasks": "copytext", "lengths": [512], "texts": "/nowhere/at/all.txt"}, "all.txt"),
        pytest.param(
            {"tasks": "copytext", "device": "cuda:7"},
            "device 'cuda:7'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        ({"tasks": "copytext", "tokenizer": None}, "needs its tokenizer"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_before_the_model_is_touched(options, message, tmp_path):
    out = tmp_path / "record.json"
    with pytest.raises(PosencError, match=message) as caught:
        evaluate(Unloadable(), **{"tokenizer": tiny_tokenizer(), **options}, out=out)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_tasks_whose_data_cannot_be_had_say_so_before_the_model(tmp_path):
    task = tmp_path / "absent.yaml"
    task.write_text(FOREIGN.format(file=tmp_path / "absent.jsonl"))
    with pytest.raises(PosencError, match=r"absent.yaml' cannot be loaded .*download"):
        evaluate(Unloadable(), tiny_tokenizer(), [str(task)])


def test_max_length_lets_a_model_go_further(text_file):
    short = tiny_model(config=tiny_config(max_position_embeddings=256))
    with pytest.raises(PosencError, match="max_length"):
        evaluate(short, tiny_tokenizer(), "copytext_400", limit=1, texts=text_file)
    record = evaluate(
        short, tiny_tokenizer(), "copytext_400", limit=1, texts=text_file, max_length=400
    )
    assert record.score("copytext", "nll", length=400).stderr is None


def test_scores_that_are_no_numbers_are_not_written(tmp_path):
    record = EvalRecord("stock", "m", scores=[Score("copytext", "nll", math.nan, None, 1)])
    with pytest.raises(PosencError, match="overflow"):
        record.write(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ('{"kind": "heal"}', "not an evaluation record"),
        ('{"kind": "eval", "schema": 9}', "schema 9"),
        ('{"kind": "eval", "schema": 1, "scores": [{"task": "x"}]}', "damaged"),
    ],
)
def test_damaged_records_are_named(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(PosencError, match=message):
        EvalRecord.read(path)


def test_standard_errors():
    assert mean_and_stderr([1.0, 2.0, 4.0]) == (
        pytest.approx(7 / 3),
        pytest.approx(torch.tensor([1.0, 2.0, 4.0]).std().item() / math.sqrt(3)),
    )
    # Two probes that always agree are one: the error is that of the two haystacks' means.
    clustered = mean_and_stderr([0.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
    assert clustered == (0.5, pytest.approx(mean_and_stderr([0.0, 1.0])[1]))
    assert mean_and_stderr([1.0, 0.0], ["a", "a"]) == (0.5, None)
    # Unequal clusters, by hand: residual sums -0.5 - 0.5 and 1; sqrt(2/1 * 2) / 3.
    assert mean_and_stderr([0.0, 0.0, 1.5], [0, 0, 1]) == (0.5, pytest.approx(2 / 3))


def test_position_bins():
    assert position_bins(8192) == [
        (0, 128),
        (128, 256),
        (256, 512),
        (512, 1024),
        (1024, 2048),
        (2048, 4096),
        (4096, 8192),
    ]
    assert position_bins(100) == [(0, 100)]
    assert position_bins(3000)[-1] == (2048, 3000)
    assert parse_bin_metric("nll_256_512") == (256, 512)
    assert parse_bin_metric("nll") is None and parse_bin_metric("em_strict") is None


def test_task_files_hold_every_kind_and_length():
    manager = TaskManager(include_path=str(resources.tasks_dir()), include_defaults=False)
    expected = {f"{kind}_{length}" for kind in KINDS for length in LENGTHS}
    assert set(manager.all_subtasks) == expected
    assert set(manager.all_groups) == {*KINDS, *(f"posenc_{length}" for length in LENGTHS)}
    for suite in SUITES:
        assert {task.name for task in plan_tasks(suite, None, None)[0]} <= expected
    # Every bin of the lengths with files is a declared metric, the others are made to fit.
    declared = (resources.tasks_dir() / "_ppl_bins").read_text()
    assert all(f"metric: nll_{low}_{high}," in declared for low, high in position_bins(8192))


def test_names_expand():
    own, others = plan_tasks("niah_essay_512,copytext, hellaswag", [256], 5)
    assert [(t.name, t.count) for t in own] == [("niah_essay_512", 5), ("copytext_256", 5)]
    assert others == ["hellaswag"]
    assert [t.length for t in plan_tasks("quick", [1024], None)[0]] == [1024] * 3
    assert {t.kind for t in plan_tasks("posenc_300", None, None)[0]} == set(KINDS)


def test_the_fallback_text_is_announced(monkeypatch, caplog):
    def unavailable(source, split):
        raise PosencError(f"{source}: cannot be had")

    monkeypatch.setattr("hf_posenc.evaluation.texts.load_text", unavailable)
    assert resolve_source(None) == FALLBACK
    assert ESSAYS in caplog.text and FALLBACK in caplog.text
    assert resolve_source("mine.txt") == "mine.txt"
    assert len(load_text(FALLBACK, "heldout").text) > 10_000
