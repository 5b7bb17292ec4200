"""Werewolf: a game for six players, two of whom are wolves."""
