"""The shop over HTTP, with pages for browsers and agents. This module owns the server; the shop itself is in world.py.

    GET  /              the instructions, each a link to a session
    GET  /s/NAME        the session's current page; NAME is a goal's number, optionally with a dot and any suffix
    POST /s/NAME        action=search[words] or action=click[label]

With `Accept: application/json` a response is {"text", "done", "valid"}. Otherwise GET returns a page, and POST
redirects to it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from html import escape
from http import HTTPStatus
from urllib.parse import parse_qs, quote, unquote

from examples.loopback import Pages, listening
from examples.webshop.world import Answer, Session, Shop

MAX_BODY_BYTES = 1 << 20  # far above any answer: one that is refused here would fail its run
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:44em;margin:2em auto;padding:0 1em}form{display:inline}"
    "button{margin:2px;padding:4px 12px}.chosen{background:#246;color:#fff}li,p{margin:6px 0}"
)


@contextlib.contextmanager
def serve(shop: Shop, port: int = 0) -> Iterator[str]:
    """Serve a shop on this machine's loopback interface while the block runs. Yields its URL."""
    with listening(_handler(shop), port) as url:
        yield url


def _handler(shop: Shop) -> type[Pages]:
    lock = threading.Lock()

    class Handler(Pages):
        def do_GET(self) -> None:
            with lock:
                if self.path == "/":
                    self.send(HTTPStatus.OK, home_page(shop))
                elif (session := self._session()) is not None:
                    self._show(session, Answer(session.text(), session.done, True))

        def do_POST(self) -> None:
            body = self.read_body(MAX_BODY_BYTES)
            if body is None:
                self.send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too long, or its length is not said")
                return
            form = parse_qs(body.decode("utf-8", "replace"))
            action = form.get("action", [""])[0]
            if "words" in form:  # from the page's search box
                action = f"search[{form['words'][0]}]"
            with lock:
                session = self._session()
                if session is not None:
                    self._show(session, session.act(action))

        def _session(self) -> Session | None:
            try:
                if not self.path.startswith("/s/"):
                    raise ValueError(f"no page {self.path!r}: see /")
                return shop.session(unquote(self.path[len("/s/") :]))
            except ValueError as exc:
                self.send(HTTPStatus.NOT_FOUND, escape(str(exc)))
                return None

        def _show(self, session: Session, answer: Answer) -> None:
            if "application/json" in self.headers.get("Accept", ""):
                said = {"text": answer.text, "done": answer.done, "valid": answer.valid}
                self.send(HTTPStatus.OK, json.dumps(said), "application/json")
            elif self.command == "POST":
                self.send(HTTPStatus.SEE_OTHER, "", headers={"Location": self.path})
            else:
                self.send(HTTPStatus.OK, session_page(self.path, session))

    return Handler


def home_page(shop: Shop) -> str:
    """Return the instructions as a page, each a link."""
    rows = "".join(f'<li><a href="/s/{g.number}">{escape(g.instruction)}</a></li>' for g in shop.catalogue.goals)
    return _page(f"<h1>The shop</h1><p>{len(shop.catalogue.products)} products</p><ol start=0>{rows}</ol>")


def session_page(path: str, session: Session) -> str:
    """Return the session's current page, with a button for each possible action."""

    def button(label: str, chosen: bool = False) -> str:
        value, shade = escape(f"click[{label}]"), " class=chosen" if chosen else ""
        inside = f'<button{shade} name=action value="{value}">{escape(label)}</button>'
        return f'<form method=post action="{form}">{inside}</form>'

    form = escape(quote(path))
    search = f'<form method=post action="{form}"><input name=words autofocus><button>search</button></form>'
    rows: list[str] = []
    labels = session.labels()
    if session.page == "item" and session.product is not None:
        product = session.product
        rows.append(f"<h2>{escape(product.title)} ${product.price_with(session.chosen)}</h2>")
        for name, values in product.options.items():
            rows.append(f"<p>{name} {''.join(button(v, session.chosen.get(name) == v) for v in values)}</p>")
        rows.append("".join(map(button, labels[-2:])))
    elif session.page == "results":
        places = zip(labels, session.shown, strict=False)  # the other labels turn pages
        rows += [f"<p>{button(label)} {escape(p.title)} ${p.price}</p>" for label, p in places] or ["nothing found"]
        rows.append("".join(map(button, labels[len(session.shown) :])) + search)
    else:
        rows.append(f"<p>{escape(session.text())}</p>" if session.done else search)
    return _page(f"<p><b>{escape(session.goal.instruction)}</b></p>" + "".join(rows))


def _page(body: str) -> str:
    return f"<!doctype html><meta charset=utf-8><title>The shop</title><style>{STYLE}</style>{body}"
