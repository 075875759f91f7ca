"""Words that needle keys are made of: short, common, unrelated to each other."""

from __future__ import annotations

import random

_ADJECTIVES = """
amber ancient bitter blue bold brave bright broken calm careful cheap clean clever cold cosmic
crisp curious dark deep distant dusty eager early easy empty fancy fast final fresh frozen
gentle giant golden grand green happy heavy hidden hollow honest humble icy idle iron jolly
keen kind large late lazy light little lonely loud lucky mellow merry mighty modern narrow
neat noble odd old olive open pale patient plain polite proud quick quiet rapid rare red rich
rough round royal rusty salty scarlet shallow sharp shy silent silver simple slow small smooth
soft solar solid spare square steady steep strange strong sudden sunny sweet swift tall tame
tender thin tidy tiny velvet vivid warm weary wide wild windy wise wooden young
"""
_NOUNS = """
acorn anchor apple arrow badge bakery balloon banjo barrel basket beacon bell bicycle blanket
bottle bridge bucket button cabin camel candle canoe canyon carpet castle cedar chair cherry
circle clock cloud cobra comet copper coral cottage cradle crane crayon cricket crown dagger
desert diamond dolphin donkey dragon drum eagle engine falcon feather ferry fiddle flute
forest fossil fountain garden giraffe glacier goblet guitar hammer harbor hawk helmet heron
island jacket jaguar jungle kettle kitten ladder lagoon lantern lemon lizard lobster magnet
mango maple marble meadow mirror monkey mountain needle oasis ocean orchard otter oyster
paddle palace panda parrot pebble pencil pepper pigeon pillow planet pocket pony prairie
pumpkin puzzle rabbit river rocket saddle salmon scarf shadow shovel spider spoon statue
tiger timber tractor trumpet tulip tunnel turtle valley violin wagon walnut whistle window
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())


def key_word(rng: random.Random) -> str:
    """A key such as `amber-lantern`."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def magic_number(rng: random.Random) -> str:
    """A value of seven digits, the first not 0."""
    return str(rng.randint(10**6, 10**7 - 1))
