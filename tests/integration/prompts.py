"""Prompts of the integration tests, as token ids of SmolLM2's tokenizer."""

from __future__ import annotations

from pathlib import Path

BATCH_LENGTHS = (5, 16, 33, 64, 101, 150, 222, 300)
"""Tokens of the eight prompts of the batch; 16, 64 end with a block, the others inside one."""

NOTES = (
    "The harbour master keeps a book in which every boat is entered before it may leave. Each "
    "line has the name of the boat, the hour, the number of people on board, the direction of "
    "the wind and the name of the person who wrote it. When a boat returns, the line is struck "
    "out with a ruler. At dusk the harbour master reads the book from the first page to the "
    "last, and for every line that is not struck out a lamp is lit on the wall of the mole. In "
    "a good summer the wall stays dark. In a bad autumn there can be nine or ten lamps, and "
    "people come down from the town to count them without saying a word.",
    "A pump in the cellar lifts the water of the spring to a tank under the roof, from where it "
    "runs to the kitchen and the stable by its own weight. The pump is driven by a small wheel "
    "in the brook. If the brook freezes, the wheel stops, and the tank lasts for three days if "
    "nobody washes clothes. On the second day the children are sent to the neighbour with two "
    "buckets each. The neighbour has a pump with a handle and complains about the noise, but "
    "gives every child an apple for the way back.",
    "Sourdough is flour, water and patience. Mix equal weights of flour and water in a jar and "
    "leave it in a warm place. Every day throw away half of it and add the same amount of fresh "
    "flour and water. After a week it smells of apples and doubles within six hours. Then it is "
    "ready. Keep a spoonful of it in the cold for the next bread, and write the date on the "
    "lid, because a jar that nobody dares to open is of no use to anybody.",
    "To measure the height of a tower without climbing it, wait until your own shadow is as "
    "long as you are tall. At that moment the shadow of the tower is as long as the tower is "
    "high, and you can measure it on the ground with a rope. If the sun is hidden, put a mirror "
    "on the ground and step back until you see the top of the tower in it. The height of the "
    "tower is to your own height as the distance of the mirror from the tower is to its "
    "distance from you. Both ways are older than any book about them.",
)

QUESTION = "Question: What is the capital of France, and which river runs through it?\nAnswer:"

SHARED_PREFIX = f"{NOTES[2]} {NOTES[3][:190]}"
ENDINGS = (
    " What the children thought of all this was",
    " The first rule of the house was therefore",
)

REWRITE = (
    "<|im_start|>user\nRepeat the following text word for word, and nothing else.\n\n{text}"
    "<|im_end|>\n<|im_start|>assistant\n"
)


def encode(model: Path, text: str) -> list[int]:
    """Token ids of a text, without special tokens added."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return ids


def short(model: Path) -> list[list[int]]:
    """One short prompt."""
    return [encode(model, QUESTION)]


def batch(model: Path) -> list[list[int]]:
    """Eight prompts of `BATCH_LENGTHS` tokens that share no prefix of a block."""
    prompts = []
    for row, length in enumerate(BATCH_LENGTHS):
        notes = NOTES[row % len(NOTES) :] + NOTES[: row % len(NOTES)]
        first = "" if row < len(NOTES) else "Chapter two. "
        prompts.append(encode(model, first + " ".join(notes))[:length])
    return prompts


def shared_prefix(model: Path) -> list[list[int]]:
    """Two prompts whose first tokens, more than a block of 128, are the same."""
    return [encode(model, SHARED_PREFIX + ending) for ending in ENDINGS]


def rewrite(model: Path) -> list[list[int]]:
    """Two prompts whose answers repeat them, so that looking up n-grams pays."""
    return [encode(model, REWRITE.format(text=note)) for note in NOTES[1:3]]
