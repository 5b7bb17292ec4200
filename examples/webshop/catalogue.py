"""The shop's products and the customers' goals, generated from a seed: 300 products and 200 instructions.

A product is of one of twenty kinds. It has attributes in its title, options to choose from, and a price, to which some
sizes add. Each instruction is written for a product that meets it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PRODUCTS, GOALS = 300, 200
# (category, group) → kinds
GROUPS: dict[tuple[str, str], tuple[str, ...]] = {
    ("clothing", "tops"): ("shirt", "sweater", "jacket", "hoodie"),
    ("clothing", "legs"): ("trousers", "shorts", "socks", "skirt"),
    ("home", "bedroom"): ("pillow", "blanket", "lamp", "rug"),
    ("home", "kitchen"): ("mug", "pan", "kettle", "apron"),
    ("outdoor", "camping"): ("tent", "backpack", "bottle", "hammock"),
}
ATTRIBUTES = ("soft", "light", "warm", "strong", "quiet", "slim", "classic", "modern")
OPTIONS: dict[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "black", "white", "yellow"),
    "size": ("small", "medium", "large", "huge"),
    "pattern": ("plain", "striped", "dotted", "checked"),
}
VALUES = 4  # values that a product offers of each option
SIZE_SURCHARGE = {"small": 0, "medium": 1, "large": 2, "huge": 4}  # dollars


@dataclass(frozen=True, slots=True)
class Product:
    """One product. price: in dollars, before the surcharge of its size."""

    code: str
    title: str
    kind: str
    category: tuple[str, str]
    attributes: frozenset[str]
    options: dict[str, tuple[str, ...]]
    price: int

    def price_with(self, chosen: dict[str, str]) -> int:
        """Return the price in dollars with the chosen options."""
        return self.price + SIZE_SURCHARGE.get(chosen.get("size", ""), 0)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a customer wants, as text and as fields. price_below: the highest acceptable price in dollars."""

    number: int
    instruction: str
    kind: str
    title: str
    category: tuple[str, str]
    attributes: frozenset[str]
    options: dict[str, str]
    price_below: int


@dataclass(frozen=True)
class Catalogue:
    """All products, by their codes, and all goals."""

    products: dict[str, Product]
    goals: list[Goal]
    seed: int = 0


def make_catalogue(seed: int = 0, products: int = PRODUCTS, goals: int = GOALS) -> Catalogue:
    """Generate the catalogue of a seed."""
    draw = random.Random(f"catalogue {seed}")
    kinds = [(kind, group) for group, some in GROUPS.items() for kind in some]
    goods = {}
    for number in range(products):
        kind, category = kinds[number % len(kinds)]
        goods[f"b{number:03d}"] = _make_product(f"b{number:03d}", kind, category, draw)
    wanted = [_make_goal(number, draw.choice(list(goods.values())), draw) for number in range(goals)]
    return Catalogue(goods, wanted, seed)


def _make_product(code: str, kind: str, category: tuple[str, str], draw: random.Random) -> Product:
    attributes = draw.sample(ATTRIBUTES, 2)
    options = {}
    for name, values in OPTIONS.items():
        offered = set(draw.sample(values, VALUES))
        options[name] = tuple(value for value in values if value in offered)
    title = " ".join((*attributes, kind))
    return Product(code, title, kind, category, frozenset(attributes), options, draw.randint(8, 95))


def _make_goal(number: int, product: Product, draw: random.Random) -> Goal:
    attribute = draw.choice(sorted(product.attributes))
    options = {name: draw.choice(values) for name, values in product.options.items()}
    price_below = (product.price_with(options) // 10 + 1) * 10
    chosen = " , ".join(f"{name} {value}" for name, value in options.items())
    return Goal(
        number=number,
        instruction=f"buy a {attribute} {product.kind} , {chosen} , price below {price_below} dollars",
        kind=product.kind,
        title=product.title,
        category=product.category,
        attributes=frozenset((attribute,)),
        options=options,
        price_below=price_below,
    )
