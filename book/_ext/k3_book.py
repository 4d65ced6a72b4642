"""Mends what Jupyter Book 1.0.4 puts into the head of each page."""

UNUSED = "thebe"  # code cells that run in the page: needs another host, so it is off


def tidy_scripts(app, pagename, templatename, context, doctree):
    """Keep each script once (a repeated `const` is an error) and leave out the unused ones."""
    kept = {}
    for script in context.get("script_files", []):
        key = _content(script)
        if UNUSED not in key.lower():
            kept.setdefault(key, script)
    context["script_files"][:] = kept.values()
    styles = context.get("css_files", [])
    context["css_files"][:] = [css for css in styles if UNUSED not in _content(css).lower()]


def _content(asset):
    """File name and attributes of a script or style sheet; an inline script is an attribute."""
    name = getattr(asset, "filename", asset) or ""
    return f"{name} {sorted(getattr(asset, 'attributes', {}).items())}"


def setup(app):
    app.connect("html-page-context", tidy_scripts, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
