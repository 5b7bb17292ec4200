"""The shop: search, sessions and their pages. Pure and deterministic; independent of models and HTTP.

A session's name begins with the number of its goal: "17" or "17.anything". A session takes two forms of actions,
search[words] and click[label]. It ends with a purchase, after MAX_STEPS possible actions, or after MAX_INVALID
impossible ones.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from examples.webshop.catalogue import Catalogue, Goal, Product, make_catalogue

MAX_STEPS = 15
MAX_INVALID = 15  # impossible actions are not steps; after this many the session ends
PAGE_SIZE = 3
MOST_FOUND = 50
BM25_K1, BM25_B = 1.2, 0.75
BUY, BACK, NEXT, PREVIOUS = "buy now", "back to search", "next", "previous"
_ACTION = re.compile(r"\s*(search|click)\s*\[([^\[\]]*)\]", re.IGNORECASE)
_WORD = re.compile(r"[a-z0-9]+")


def parse_action(text: str) -> tuple[str, str] | None:
    """Return the verb and argument of a text's first action, or None if it has none.

    >>> parse_action("I look first: search[Red  shirt]")
    ('search', 'red shirt')
    """
    found = _ACTION.search(text)
    return None if found is None else (found[1].lower(), " ".join(found[2].lower().split()))


class SearchIndex:
    """Okapi BM25 (Robertson and Zaragoza 2009, equation 3.15) over titles and categories. Ties are sorted by code."""

    def __init__(self, products: dict[str, Product]) -> None:
        self._postings: dict[str, list[tuple[str, float]]] = defaultdict(list)
        counts = {c: Counter(_WORD.findall(f"{p.title} {' '.join(p.category)}")) for c, p in products.items()}
        mean = sum(count.total() for count in counts.values()) / max(1, len(counts))
        for code, count in counts.items():
            norm = BM25_K1 * (1 - BM25_B + BM25_B * count.total() / mean)
            for word, n in count.items():
                self._postings[word].append((code, n * (BM25_K1 + 1) / (n + norm)))
        self._size = len(products)

    def find(self, words: str) -> list[str]:
        """Return the codes of matching products, best first."""
        scores: dict[str, float] = defaultdict(float)
        for word in _WORD.findall(words.lower()):
            postings = self._postings.get(word, [])
            weight = math.log(1 + (self._size - len(postings) + 0.5) / (len(postings) + 0.5))
            for code, score in postings:
                scores[code] += weight * score
        return sorted(scores, key=lambda code: (-scores[code], code))[:MOST_FOUND]


@dataclass(frozen=True, slots=True)
class Purchase:
    """A purchase: the product, the chosen options, and its price in dollars."""

    product: Product
    options: dict[str, str]
    price: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to an action. valid: whether it was possible, and so counted as a step."""

    text: str
    done: bool
    valid: bool


@dataclass
class Session:
    """One visit. page: "search", "results", "item" or "end"."""

    shop: Shop
    goal: Goal
    page: str = "search"
    found: list[str] = field(default_factory=list)
    first: int = 0  # index of the first result shown
    product: Product | None = None
    chosen: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    invalid: int = 0
    bought: Purchase | None = None

    @property
    def done(self) -> bool:
        """Whether the visit is over."""
        return self.page == "end"

    @property
    def shown(self) -> list[Product]:
        """The products on the current page of results."""
        return [self.shop.catalogue.products[code] for code in self.found[self.first : self.first + PAGE_SIZE]]

    def labels(self) -> list[str]:
        """Return the labels that can be clicked."""
        if self.page == "item" and self.product is not None:
            return [value for values in self.product.options.values() for value in values] + [BUY, BACK]
        if self.page == "results":
            turns = [NEXT] * (self.first + PAGE_SIZE < len(self.found)) + [PREVIOUS] * (self.first > 0)
            return [str(place) for place in range(1, len(self.shown) + 1)] + turns + [BACK]
        return []

    def act(self, text: str) -> Answer:
        """Do the first action of a text. Any text gets an answer."""
        action = parse_action(text)
        if action is None:
            return self._refuse("no action: say search[words] or click[label]")
        verb, argument = action
        return self.search(argument) if verb == "search" else self.click(argument)

    def search(self, words: str) -> Answer:
        """Search. Possible on the search page and on the results page."""
        if self.page not in ("search", "results"):
            return self._refuse(f"no search here: click [{BACK}] first")
        if not _WORD.search(words.lower()):
            return self._refuse("search for words")
        self.found, self.first, self.page = self.shop.index.find(words), 0, "results"
        return self._step()

    def click(self, label: str) -> Answer:
        """Click a label of the page. A value may follow the name of its option, such as "colour red"."""
        label = " ".join(label.lower().split())
        option, _, value = label.partition(" ")
        if self.page == "item" and self.product is not None and value in self.product.options.get(option, ()):
            label = value
        if label not in self.labels():
            return self._refuse(f"no [{label}] here")
        if label == BACK:
            self.page, self.product, self.chosen = "search", None, {}
        elif label in (NEXT, PREVIOUS):
            self.first += PAGE_SIZE if label == NEXT else -PAGE_SIZE
        elif self.page == "results":
            self.page, self.product, self.chosen = "item", self.shown[int(label) - 1], {}
        elif self.product is not None and label == BUY:
            price = self.product.price_with(self.chosen)
            self.bought, self.page = Purchase(self.product, dict(self.chosen), price), "end"
        elif self.product is not None:
            name = next(name for name, values in self.product.options.items() if label in values)
            self.chosen[name] = label
            return self._step(f"{name} {label} ${self.product.price_with(self.chosen)}")
        return self._step()

    def text(self) -> str:
        """Return the page as an agent reads it."""
        if self.page == "end":
            return "bought" if self.bought else "the shop is closed"
        if self.page == "item" and self.product is not None:
            rows = [f"{name}: {' '.join(values)}" for name, values in self.product.options.items()]
            return "\n".join([f"{self.product.title} ${self.product.price}", *rows, f"[{BUY}] [{BACK}]"])
        if self.page == "results":
            rows = [f"[{place}] {product.title} ${product.price}" for place, product in enumerate(self.shown, 1)]
            turns = " ".join(f"[{label}]" for label in self.labels()[len(self.shown) :])
            return "\n".join([*(rows or ["nothing found"]), turns])
        return "search[words]"

    def _step(self, text: str | None = None) -> Answer:
        self.steps += 1
        if self.steps >= MAX_STEPS and not self.done:
            self.page, text = "end", None
        return Answer(self.text() if text is None else text, self.done, True)

    def _refuse(self, why: str) -> Answer:
        if self.done:
            return Answer(self.text(), True, False)
        self.invalid += 1
        if self.invalid >= MAX_INVALID:
            self.page = "end"
            return Answer(self.text(), True, False)
        return Answer(f"not possible: {why}", False, False)


class Shop:
    """The catalogue, its index, and the sessions by name."""

    def __init__(self, catalogue: Catalogue | None = None) -> None:
        self.catalogue = catalogue or make_catalogue()
        self.index = SearchIndex(self.catalogue.products)
        self.sessions: dict[str, Session] = {}

    def session(self, name: str) -> Session:
        """Return the session with this name, created if new. Raises ValueError for a name without a goal's number."""
        if name not in self.sessions:
            number = name.partition(".")[0]
            if not number.isascii() or not number.isdecimal() or int(number) >= len(self.catalogue.goals):
                raise ValueError(
                    f"session {name!r}: begin it with a goal's number, 0 to {len(self.catalogue.goals) - 1}"
                )
            self.sessions[name] = Session(self, self.catalogue.goals[int(number)])
        return self.sessions[name]

    def close(self, name: str) -> None:
        """Remove a session."""
        self.sessions.pop(name, None)
