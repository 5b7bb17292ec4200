"""WebShop's reward of a purchase, 0 to 1 (Yao et al. 2022, section 3.1), and its sparse form.

reward = type · (attributes met + options met + price met) / (attributes + options + 1). `type` is 0 for a product with
none of the wanted title's nouns and 0.1 for one with less than a tenth of them. For others it is 1 if the product is of
the wanted kind, of both its categories, or has more than a fifth of the nouns, else 0.5.
"""

from __future__ import annotations

from typing import Any

from examples.webshop.catalogue import ATTRIBUTES, Goal, Product
from examples.webshop.world import Purchase

UNFINISHED = -0.1  # in the sparse form; the value is that of Trinity-RFT's environments


def type_reward(product: Product, goal: Goal) -> float:
    """Return how well the product's type matches the goal."""
    wanted, has = (set(title.split()) - set(ATTRIBUTES) for title in (goal.title, product.title))  # nouns count
    share = len(wanted & has) / len(wanted)
    if share < 0.1:
        return 0.1 if share else 0.0
    alike = product.kind == goal.kind or len(set(product.category) & set(goal.category)) >= 2
    return 1.0 if alike or share > 0.2 else 0.5


def parts(purchase: Purchase | None, goal: Goal) -> dict[str, float]:
    """Return the parts of the reward, each as the fraction that is met; all 0 without a purchase."""
    if purchase is None:
        return {"bought": 0.0, "type": 0.0, "attributes": 0.0, "options": 0.0, "price": 0.0}
    options = sum(purchase.options.get(name) == value for name, value in goal.options.items())
    return {
        "bought": 1.0,
        "type": type_reward(purchase.product, goal),
        "attributes": len(purchase.product.attributes & goal.attributes) / len(goal.attributes),
        "options": options / len(goal.options),
        "price": float(purchase.price <= goal.price_below),
    }


def reward(purchase: Purchase | None, goal: Goal, *, sparse: bool = False) -> dict[str, Any]:
    """Return the result of a workflow: the reward, with its parts as metrics.

    sparse: 1 if all is met, 0 for another purchase, and UNFINISHED if nothing was bought.
    """
    met = parts(purchase, goal)
    n_attributes, n_options = len(goal.attributes), len(goal.options)
    points = met["attributes"] * n_attributes + met["options"] * n_options + met["price"]
    value = met["type"] * points / (n_attributes + n_options + 1)
    solved = float(abs(value - 1.0) < 1e-9)
    if sparse:
        value = UNFINISHED if purchase is None else solved
    return {"reward": value, "metrics": {**met, "solved": solved}}
