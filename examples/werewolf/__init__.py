"""Werewolf: a game of six, two of whom are wolves."""
