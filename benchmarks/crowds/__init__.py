"""Honest callers while others misbehave: how long their chats take, relative to those without the others.

32 callers chat, without a pause ("busy") or at a fixed rate ("steady"), alternately alone and beside one of these
crowds: connections that send nothing (silent), that send a body byte by byte (slow), that request a stream and do not
read it (deaf), or that send one feedback of 10,000 targets after the other. A measurement beside feedback lasts until
two are answered. The explorer runs on one core, everything else on the other.
"""
