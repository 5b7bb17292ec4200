"""Honest callers while others misbehave: how long their chats take, relative to those without the others.

32 callers chat, alternately alone and beside one of these crowds: connections that send nothing (silent), that send a
body byte by byte (slow), that request a stream and do not read it (deaf), or that send one feedback of 10,000 targets
after the other. A measurement beside feedback lasts until two are answered. The explorer runs on one core, everything
else on the other.

A "busy" caller sends a chat when the one before is answered, so a standstill of the explorer is one slow chat of each
caller. A chat of a "steady" caller is due each 80 ms. If the one before is not answered by then, it is sent later, but
its time begins when it was due: so a standstill delays all chats that are due meanwhile. Beside feedback, the slowest
chat has a bound too.
"""
