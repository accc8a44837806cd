"""Build the documentation site into build/site: `make docs`, or `python docs/build.py`.

docs/ is written so that it reads well on a code host, too: it links examples and results that lie outside of it. So
the pages are staged first, under build/pages, with what they link; the navigation is the list of docs/index.md. Every
page is also there as Markdown, beside its HTML, and llms.txt lists them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from txbox import errors

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUILD = ROOT / "build"
PAGES, SITE = BUILD / "pages", BUILD / "site"
TOP = {
    f"{name}.md": f"project/{name.lower()}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")
}
#: Shown as a page with highlighted code; anything else that a page links is copied as it is.
_CODE = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".sql": "sql"}

#: What the theme would load from the network: package, file in it and its SHA-256. The first lets search run from disk.
_SCRIPTS = {
    "shim.js": (
        "iframe-worker@1.0.4",
        "package/shim/index.js",
        "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609",
    ),
    "mermaid.js": (
        "mermaid@11.17.2",
        "package/dist/mermaid.min.js",
        "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8",
    ),
}

_TEXTS = "::: texts\n"
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
_ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#\s]+)\)(.*)$")


def stage() -> None:
    """Copy the pages to build/pages, and beside them what they link outside of docs/."""
    shutil.rmtree(PAGES, ignore_errors=True)
    todo = [
        path
        for path in sorted(DOCS.rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    todo += [ROOT / name for name in TOP]
    done: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in done:
            continue
        done.add(path)
        target = PAGES / _place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            todo += [each for each in path.iterdir() if each.is_file()]
            target.write_text(_listing(path))
        elif path.suffix == ".md":
            text = path.read_text()
            todo += [found for found in _linked(path, text) if found not in done]
            text = _relinked(path, text)
            # reads all of the source
            target.write_text(text.replace(_TEXTS, _texts()) if _TEXTS in text else text)
        elif path.suffix in _CODE:
            name = path.relative_to(ROOT)
            # a reader who searches wants a page, or an example; not the test that a page names as its evidence
            hidden = "" if name.parts[0] == "examples" else "---\nsearch:\n  exclude: true\n---\n"
            code = f"```{_CODE[path.suffix]}\n{path.read_text()}```\n"
            target.write_text(f"{hidden}# {name}\n\n{code}")
        else:
            shutil.copyfile(path, target)


def _place(path: Path) -> str:
    """Where a file of the repository is below build/pages."""
    name = path.relative_to(ROOT).as_posix()
    if name in TOP:
        return TOP[name]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if path.is_dir():
        return f"files/{name}/index.md"
    return f"files/{name}.md" if path.suffix in _CODE else f"files/{name}"


def _local(path: Path, link: str) -> tuple[Path, str] | None:
    """The file that a link of this page means, and the link's fragment; None for the web's and the page's own."""
    target, _, anchor = link.partition("#")
    if "://" in link or not target or link.startswith("mailto:"):
        return None
    return (path.parent / target).resolve(), f"#{anchor}" if anchor else ""


def _linked(path: Path, text: str) -> Iterator[Path]:
    for _, link, _ in _LINK.findall(_FENCE.sub("", text)):
        if (found := _local(path, link)) is not None:
            yield found[0]


def _relinked(path: Path, text: str) -> str:
    here = Path(_place(path)).parent

    def moved(match: re.Match[str]) -> str:
        found = _local(path, match[2])
        if found is None:
            return match[0]
        target = os.path.relpath(_place(found[0]), here)
        return f"{match[1]}{target}{found[1]}{match[3]}"

    pieces = re.split(f"({_FENCE.pattern})", text, flags=_FENCE.flags)
    return "".join(each if each.startswith("```") else _LINK.sub(moved, each) for each in pieces)


def _listing(folder: Path) -> str:
    files = sorted(each for each in folder.iterdir() if each.is_file())
    rows = "\n".join(f"- [{each.name}]({Path(_place(each)).name})" for each in files)
    return f"# {folder.relative_to(ROOT)}\n\n{rows}\n"


def navigation(index: str = "index.md") -> list[dict[str, Any]]:
    """The lists of an index page: its second headings are sections, its third ones groups in them."""
    sections: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for line in _FENCE.sub("", (DOCS / index).read_text()).splitlines():
        if line.startswith("## "):
            entries = []
            sections.append({line[3:]: entries})
        elif line.startswith("### "):
            entries = []
            next(iter(sections[-1].values())).append({line[4:]: entries})
        elif found := _ENTRY.match(line):
            entries.append(_entry(index, found[1].replace("`", ""), found[2]))
    return [section for section in sections if any(section.values())]


def _entry(index: str, title: str, link: str) -> dict[str, Any]:
    path = (DOCS / index).parent / link
    place = _place(path.resolve())
    if Path(link).name == "index.md":
        inside = navigation(place)
        return {
            title: [place, *(each for section in inside for each in next(iter(section.values())))]
        }
    return {title: place}


def _places(nav: list[Any]) -> Iterator[tuple[str, str]]:
    for each in nav:
        for title, inside in each.items() if isinstance(each, dict) else [("Overview", each)]:
            if isinstance(inside, str):
                yield title, inside
            else:
                yield from _places(inside)


def _short(nav: list[Any]) -> list[Any]:
    """The navigation without what follows a colon in its titles: the sidebar is narrow."""
    return [
        each
        if isinstance(each, str)
        else {
            title.partition(": ")[0]: inside if isinstance(inside, str) else _short(inside)
            for title, inside in each.items()
        }
        for each in nav
    ]


def build() -> None:
    """Write build/site; anything the builder warns of is an error."""
    stage()
    nav = [{"txbox": "index.md"}, *navigation()]
    shown = _short(nav)
    settings = {"INHERIT": "../mkdocs.yml", "docs_dir": "pages", "site_dir": "site", "nav": shown}
    config = BUILD / "mkdocs.yml"
    config.write_text(json.dumps(settings, indent=1))  # JSON is YAML
    shutil.rmtree(SITE, ignore_errors=True)
    builder = Path(sys.executable).parent / "zensical"
    command = [str(builder), "build", "--clean", "--strict", "-f", str(config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = f"{done.stdout}{done.stderr}"
    if (
        done.returncode or "griffe:" in said
    ):  # warnings of the docstrings' reader are not of --strict
        sys.exit(said)
    for page in PAGES.rglob("*.md"):
        (SITE / page.relative_to(PAGES)).write_text(_DIRECTIVE.sub(_api, page.read_text()))
    (SITE / "llms.txt").write_text(llms(nav))
    _localize()


def llms(nav: list[dict[str, Any]]) -> str:
    """The list of all pages for language models, as https://llmstxt.org says; the page for assistants first."""
    text = (DOCS / "index.md").read_text()
    summary = " ".join(text.split("\n\n")[1].split())
    lines = [
        "# txbox",
        "",
        f"> {summary}",
        "",
        "Start with [the page for coding assistants](assistants.md):",
    ]
    lines += [
        "the whole public surface, the rules that break code when broken, and common mistakes.",
        "",
    ]
    for section in nav[1:]:
        (title,) = section
        lines += [f"## {title}", ""]
        for name, place in _places(section[title]):
            short, colon, about = name.partition(": ")
            lines += [f"- [{short}]({place}){colon}{about}"]
        lines += [""]
    return "\n".join(lines)


def _api(directive: re.Match[str]) -> str:
    """A name of the API as Markdown: its signature, its docstring and those of its public members."""
    module, _, name = directive[1].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    text = _described(name, found)
    if isinstance(found, type):
        for member, value in vars(found).items():
            call = value.fget if isinstance(value, property) else value
            if not member.startswith("_") and inspect.isfunction(call):
                text += _described(f"{name}.{member}", call, "####")
    return text.rstrip()


def _described(name: str, found: Any, heading: str = "###") -> str:
    try:
        signature = str(inspect.signature(found))
    except (TypeError, ValueError):  # an Enum's, an exception's
        signature = ""
    return (
        f"{heading} {name}\n\n```text\n{name}{signature}\n\n{inspect.getdoc(found) or ''}\n```\n\n"
    )


def error_texts() -> dict[str, set[str]]:
    """The class of an error → the texts it is made with, `…` for what differs."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "src/txbox").rglob("*.py")):
        tree = ast.parse(file.read_text())
        constants = {
            ast.unparse(node.targets[0]): _text(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            made, about = ast.unparse(node.func), node.args[0]
            if made == "refuse":  # of brokers: what an option is refused with
                made, about = "ConfigurationError", node.args[-1]
            if made in errors.__dict__:
                texts = (re.sub("…+", "…", text) for text in _alternatives(about, constants))
                found.setdefault(made, set()).update(
                    text for text in texts if len(text.strip("… ")) > 12
                )
    return {made: texts for made, texts in found.items() if texts}


def _alternatives(node: ast.expr, constants: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.IfExp(body=one, orelse=other):
            yield from _alternatives(one, constants)
            yield from _alternatives(other, constants)
        case ast.Name(id=name) if name in constants:
            yield constants[name]
        case ast.Constant(value=str(text)):
            yield re.sub(r"\{\w+\}", "…", text)
        case _:
            yield _text(node)


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
    return "…"


def _texts() -> str:
    lines = []
    for raised, texts in sorted(error_texts().items()):
        lines += [f"## {raised}", ""]
        lines += [f"- `` {' '.join(text.split())} ``" for text in sorted(texts)]
        lines += [""]
    return "\n".join(lines)


def _localize() -> None:
    """Make the pages independent of the network: what the theme loads from it is a file of the site."""
    scripts = {
        name: _fetched(package, path, digest) for name, (package, path, digest) in _SCRIPTS.items()
    }
    if None in scripts.values():
        print("docs: npm is missing: search and diagrams of the site then need the network")
        return
    for name, script in scripts.items():
        assert script is not None
        shutil.copyfile(script, SITE / "assets/javascripts" / name)
    for page in SITE.rglob("*.html"):
        text = page.read_text()
        folder = os.path.relpath(SITE / "assets/javascripts", page.parent)
        moved = text.replace("https://unpkg.com/iframe-worker/shim", f"{folder}/shim.js")
        if 'class="mermaid"' in text:
            tag = f'<script src="{folder}/mermaid.js"></script>'
            before, bundle, behind = re.split(r"(<script src=[^>]*bundle)", moved, maxsplit=1)
            moved = f"{before}{tag}{bundle}{behind}"
        page.write_text(moved)


def _fetched(package: str, path: str, digest: str) -> Path | None:
    """A file of an npm package, fetched once; None without npm."""
    kept = Path(f"/var/tmp/txbox-packages-{os.getuid()}/{package.replace('@', '-')}.js")
    if not kept.exists():
        npm = shutil.which("npm")
        if npm is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [npm, "pack", "--silent", package],
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as packed:
                member = packed.extractfile(path)
                assert member is not None
                content = member.read()
        if hashlib.sha256(content).hexdigest() != digest:
            sys.exit(f"{package} is not the file that it should be")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(content)
    return kept


if __name__ == "__main__":
    build()
    print(f"docs: open {(SITE / 'index.html').relative_to(ROOT)}")
