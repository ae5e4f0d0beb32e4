"""For mkdocs: links from a page to files outside docs/ become the files' names.

Such links work where the repository is browsed; tests/helpers/links.py checks them.
"""

import re

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)[^)\s]*\)")


def on_page_markdown(markdown: str, **_) -> str:
    return _OUTSIDE.sub(_named, markdown)


def _named(link: re.Match) -> str:
    text, name = link.groups()
    return f"`{name}`" if text in name else f"{text} (`{name}`)"
