"""Short reviews that are positive or negative, as a dataset. This module writes them, so they need no network.

Importing the module registers the builder, so that `tfds.builder("short_reviews")` finds it by name. A sentence names a thing and an
opinion of it; the opinion's word alone decides the label. No sentence of `validation` is in `train`, but each of its words is.
"""

import zlib
from collections.abc import Iterator

import tensorflow_datasets as tfds

LABELS = ("negative", "positive")
HELD_OUT_OF = 5  # one sentence in 5 is validation

THINGS = (
    "the soup", "the hotel", "this phone", "the movie", "our guide", "the coffee", "this book", "the service", "the room", "that song",
    "the pizza", "this camera", "the concert", "my new bike", "the bread", "this game", "the museum", "their website", "the train ride",
    "this jacket", "the staff", "that play", "the battery", "the garden", "this app",
)  # fmt: skip
OPINIONS = {
    "negative": (
        "awful", "terrible", "boring", "broken", "disappointing", "dreadful", "horrible", "lousy", "poor", "useless", "bad", "annoying",
        "dirty", "overpriced", "a waste of money",
    ),
    "positive": (
        "great", "wonderful", "excellent", "lovely", "amazing", "perfect", "superb", "delightful", "fantastic", "brilliant", "good",
        "charming", "splendid", "worth every cent", "a pleasure",
    ),
}  # fmt: skip
FRAMES = (
    "{thing} was {opinion}.",
    "{thing} is {opinion}!",
    "we found that {thing} was {opinion}.",
    "honestly, {thing} is {opinion}.",
)


class ShortReviews(tfds.core.GeneratorBasedBuilder):
    """Builds the splits `train` and `validation`, with a sentence and its label per example."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}  # noqa: RUF012  the name and type are the base class's

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=LABELS)}
        return tfds.core.DatasetInfo(
            builder=self,
            description="Sentences with an opinion, positive or negative, written by a program.",
            features=tfds.features.FeaturesDict(features),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {"train": self._generate_examples(False), "validation": self._generate_examples(True)}

    def _generate_examples(self, is_validation: bool) -> Iterator[tuple[str, dict]]:
        for text, label in sentences():
            if is_held_out(text) == is_validation:
                yield text, {"text": text, "label": label}


def sentences() -> Iterator[tuple[str, str]]:
    """Yields each sentence and its label: one for each thing and opinion, in one of the frames."""
    for label in LABELS:
        for opinion in OPINIONS[label]:
            for thing in THINGS:
                frame = FRAMES[zlib.crc32(f"{thing} {opinion}".encode()) // 64 % len(FRAMES)]
                text = frame.format(thing=thing, opinion=opinion)
                yield text[0].upper() + text[1:], label


def is_held_out(text: str) -> bool:
    """Returns whether a sentence is validation, by its hash."""
    return zlib.crc32(text.encode()) % HELD_OUT_OF == 0
