"""Stop strings in streamed text, whatever the borders between its pieces.

Aho and Corasick, "Efficient string matching" (1975): one pass over the text, linear
however many stop strings there are and however much they overlap.
"""

import re
from collections.abc import Sequence


class StopMatcher:
    """Lets text through, but for what may yet become a stop string; one for each request.

    Held back is the longest end of the text that some stop string begins with, and nothing
    more. The stop string that is complete first wins; of two that end together, the longer.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop_string: bool = False) -> None:
        self._include = include_stop_string
        # By state: next state by character, state of the longest proper end that is also a
        # beginning, number of characters matched, stop string that ends here.
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._complete: list[str | None] = [None]
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._link()
        firsts = "".join(re.escape(char) for char in self._next[0])
        self._first_char = re.compile(f"[{firsts}]") if firsts else re.compile(r"(?!)")
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The text that can be shown now. After a match, `matched` says which and no more comes.

        A stop string that is complete when none may stop is let through, but for what may
        yet become another.
        """
        if self.matched is not None:
            return ""
        begin = 0
        if self._state == 0:
            first = self._first_char.search(text)
            if first is None:
                return text
            begin = first.start()
        whole = self._held + text
        place = len(self._held) + begin
        for char in text[begin:] if begin else text:
            place += 1
            self._step(char)
            stop_string = self._complete[self._state]
            if stop_string is not None:
                if may_stop:
                    return self._match(stop_string, whole, place)
                self._let_go()
        shown = len(whole) - self._depth[self._state]
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """The text still held back, once no more comes."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _match(self, stop_string: str, whole: str, end: int) -> str:
        self.matched = stop_string
        self._held = ""
        return whole[: end if self._include else end - len(stop_string)]

    def _let_go(self) -> None:
        """Leaves a complete stop string for its longest end that another may begin with."""
        while self._state and not self._next[self._state]:
            self._state = self._fallback[self._state]

    def _step(self, char: str) -> None:
        state = self._state
        while char not in self._next[state]:
            if state == 0:
                self._state = 0
                return
            state = self._fallback[state]
        self._state = self._next[state][char]

    def _insert(self, stop_string: str) -> None:
        state = 0
        for char in stop_string:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._complete.append(None)
            state = following
        self._complete[state] = stop_string

    def _link(self) -> None:
        """Breadth first, so that every fallback is ready before it is asked for."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, following in self._next[state].items():
                queue.append(following)
                self._state = self._fallback[state]
                self._step(char)
                self._fallback[following] = self._state
                if self._complete[following] is None:
                    self._complete[following] = self._complete[self._state]
        self._state = 0
