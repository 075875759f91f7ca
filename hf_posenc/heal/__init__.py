"""Healing: a short, cheap training that gives a converted model back what it could do."""

from hf_posenc.heal.config import Recipe, list_recipes, load_recipe
from hf_posenc.heal.record import HealRecord
from hf_posenc.heal.trainer import heal

__all__ = ["HealRecord", "Recipe", "heal", "list_recipes", "load_recipe"]
