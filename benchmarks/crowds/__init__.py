"""Honest callers beside a crowd that misbehaves: what their chats take, of what they take without it.

32 callers chat, as fast as they are answered ("busy") or each so often a second ("steady"), while nobody else is there
and, in turns, beside one of these: connections that say nothing (silent), that send a body byte by byte (slow), that
ask for a stream and do not read it (deaf), or one feedback of 10,000 targets after the other. The explorer runs on one
core, everybody else on the other.
"""
