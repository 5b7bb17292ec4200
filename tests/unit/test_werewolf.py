"""Werewolf's tiny model. It is made under the product's Python, as here, and not under that of the examples."""

from __future__ import annotations

from examples.tiny_model import make_tokenizer
from examples.werewolf import tiny
from examples.werewolf.world import MOST_DAYS, Game, role

BACK = 3  # tokens of the next prompt for a sampled one: a byte that is no character returns as U+FFFD


def test_the_longest_game_fits_the_tiny_models_context():
    """If nobody names a player, all six live to the last day, and each says as much as it may in every turn."""
    tokenizer, game = make_tokenizer(tiny.recipe()), Game(1)
    chats = {name: [{"role": "system", "content": f"{tiny.RULES} {role(game, name)}"}] for name in game.seats}
    while names := game.turn():
        for name in names:
            chats[name] += [{"role": "user", "content": game.tell(name)}, {"role": "assistant", "content": ""}]
        game.take(dict.fromkeys(names, ""))
    longest = 0
    for chat in chats.values():  # a player's last prompt contains the earlier ones
        prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, tokenize=False)
        replies = sum(message["role"] == "assistant" for message in chat)
        tokens = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        longest = max(longest, tokens + replies * tiny.LEARN["params"]["max_tokens"] * BACK)
    assert game.day == MOST_DAYS
    assert longest <= tiny.ENGINE["max_model_len"] == tiny.recipe().context
    assert longest <= tiny.TRAINER["max_tokens_per_micro_batch"]
