"""The explorer's cost for each chat, beside its peers and an older commit in the same run. Prints one JSON line.

    .venv/bin/python -m benchmarks.front_door [--peers PYTHON] [--against DIRECTORY] [--turns 7] [--seconds 3]
                                              [--soak 200000] [--only flywheel ...] [--no-streams]

One pinned core runs the gateways, the other a fake engine with pre-encoded replies and the clients. CPU time is that of
the gateway's processes, by the kernel's clock. Added latency is relative to the same chats sent directly to the engine.
Ours records durably (SQLite, WAL, synchronous=FULL); Trinity-RFT's proxy records with its own SQLite recorder;
LiteLLM's proxy records nothing.

All gateways run at the same time. They are loaded one after the other, in many turns, because the speed of a machine
changes within minutes. Each load of plain chats lasts as long for each gateway (--seconds), so that what happens once a
second is in all of them. A figure is the median over its turns. "flywheel / before" and similar keys
give two ratios for each figure: of the medians, and the median of the ratios within each turn. The soak follows:
resident memory over many recorded chats. A turn in which a gateway answers no chat of a load, does not finish, or ends,
is dropped: "turns_counted" is the number of the others, "turns_dropped" names each dropped one's gateway and reason.
"targets" compares the figures with their bounds; a missed target is reported, and the exit status is still 0.

--peers: the Python of a virtual environment with requirements/peers.txt, installed as that file says.
--against: a checkout of another commit (`git worktree add DIRECTORY COMMIT`). Its explorer runs as the gateway
"before", with the Python and the packages that run ours.
--turns 0 runs only the soak; --soak 0 omits the soak.
"""
