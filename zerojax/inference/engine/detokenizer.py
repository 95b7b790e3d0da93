"""Turns tokens that come one after the other into text. This module decodes a few tokens at a time, never a whole text again."""

from collections.abc import Callable, Sequence

CUT = "\ufffd"  # what a decoder writes for bytes that are no letter, or not yet one


class Growing:
    """A text that grows.

    Args:
      text_of: f(token ids) -> their text.

    Attributes:
      text: of the tokens so far. Letters of which some bytes are missing wait for the next token. It is the text of all tokens, unless they
        hold bytes that are no letters and the decoder judges bytes beside each other together: what is in the text stays.
    """

    def __init__(self, text_of: Callable[[list[int]], str]):
        self._text_of, self.text = text_of, ""
        # The tokens before `_begin` are not decoded again, and those before `_read` are in the text
        self._begin = self._read = 0

    def add(self, tokens: Sequence[int], *, is_end: bool = False) -> str:
        """Returns what the text grows by.

        A token's text may depend on the one before (a space between words), so the last addition's tokens are decoded with the new ones.

        Args:
          tokens: all so far.
          is_end: whether no more come, so that nothing waits.
        """
        known = self._text_of(list(tokens[self._begin : self._read]))
        found = self._text_of(list(tokens[self._begin :]))
        if len(found) <= len(known) or (found.endswith(CUT) and not is_end):
            return ""
        new = found[len(known) :]
        self.text += new
        self._begin, self._read = self._read, len(tokens)
        return new
