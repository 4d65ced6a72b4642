"""The page 404.html, which GitHub Pages shows at every address that has none.

It may be asked for at any depth, where a relative link to a style sheet would lead nowhere. So it
needs no other file, and its links are relative to a <base>: the path of `html: baseurl`; where the
book is not below that path, on a laptop say, a script sets another.
"""

from html import escape
from pathlib import Path
from urllib.parse import urlsplit

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>No such page — {book}</title>
<base href="{home}">
<link rel="icon" href="_static/favicon.svg">
<script>
  const here = location.pathname, base = document.querySelector("base");
  if (here.endsWith("/404.html")) base.href = "./";
  else if (!here.startsWith("{home}")) base.href = "/";
</script>
<style>
  :root {{ color-scheme: light dark; background: light-dark(#fff, #121212); }}
  body {{ font: 1rem/1.65 system-ui, sans-serif; }}
  main {{ max-width: 40rem; margin: 3rem auto; padding: 0 1rem; }}
  svg {{ width: 11rem; }}
  a {{ color: light-dark(#1160cf, #6ba4f2); }}
  input, button {{ font: inherit; padding: .3rem .6rem; }}
</style>
</head>
<body>
<main>
<a href="book/index.html" aria-label="{book}: first page">{logo}</a>
<h1>There is no page here</h1>
<p>It may have moved. These are the pages of the book:</p>
<ul>
{links}
</ul>
<form action="search.html" role="search">
<label>Search the book: <input name="q" type="search"></label>
<button>Search</button>
</form>
</main>
</body>
</html>
"""


def write(app, exception):
    if exception or app.builder.format != "html":
        return
    pages = [app.config.root_doc, *_below(app.env, app.config.root_doc)]
    links = [f'<li><a href="{app.builder.get_target_uri(page)}">{_title(app.env, page)}</a></li>'
             for page in pages]  # fmt: skip
    text = PAGE.format(
        book=escape(app.config.html_title),
        home=urlsplit(app.config.html_baseurl).path or "/",
        logo=Path(app.srcdir, "book/_assets/logo.svg").read_text(encoding="utf-8"),
        links="\n".join(links),
    )
    Path(app.outdir, "404.html").write_text(text, encoding="utf-8", newline="\n")


def _below(env, page):
    """The pages that follow `page` in the table of contents, in its order."""
    for child in env.toctree_includes.get(page, []):
        yield child
        yield from _below(env, child)


def _title(env, page):
    return escape(env.titles[page].astext())


def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
