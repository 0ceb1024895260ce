"""The documentation: its code runs, its links lead somewhere, its site builds, nothing is missing.

A page's Python blocks run in order in one namespace. A block that cannot run everywhere says so in
its first line, ``# needs ...``, where readers see it too; it is compiled all the same, and what
needs a GPU runs where there is one.
"""

from __future__ import annotations

import functools
import html.parser
import os
import re
import subprocess
import sys
import types
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import DTYPES, Slab, assert_gathered

import multigather
from multigather import api, dispatch, native
from multigather.backends import _cupy, _triton
from multigather.cache import rules, store
from multigather.request import PACKED_BYTES
from multigather.tuner import decide, measure, online, shapes

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # before torchrl reads it

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda path: path.relative_to(ROOT)
)
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]

GPU = "# needs a GPU"
# What else a block may need; such blocks are only compiled.
ELSEWHERE = ("# needs SGLang", "# needs pyg-lib")
# Packages that the tests can do without.
OPTIONAL = ("cupy", "numpy", "tensordict", "torchrl", "torch_geometric")

BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path, language: str) -> list[tuple[int, str]]:
    """Number of the first line, and text, of each code block in a language."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in BLOCK.finditer(text)
        if match[1] == language
    ]


def compiled(page: Path) -> list[tuple[str, types.CodeType]]:
    """What each Python block needs, "" for nothing, and its code."""
    result = []
    for line, text in blocks_of(page, "python"):
        first = text.partition("\n")[0]
        need = first if first.startswith("# needs") else ""
        assert need in ("", GPU, *ELSEWHERE), f"{page}:{line}: unknown mark {need!r}"
        code = "\n" * (line - 1) + text  # so that errors show the page's lines
        result.append((need, compile(code, str(page), "exec", dont_inherit=True)))
    return result


def run_blocks(page: Path) -> types.ModuleType:
    """Run a page's blocks; the result has their names."""
    # A module, because dataclasses look for the one that they are made in.
    module = types.ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module
    for need, code in compiled(page):
        if need in ELSEWHERE or (need == GPU and not torch.cuda.is_available()):
            continue
        try:
            exec(code, module.__dict__)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in OPTIONAL:
                pytest.skip(f"{error.name} is not installed")
            raise
    return module


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to work in; afterwards everything is as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dispatch, "BACKENDS", dispatch.BACKENDS)
    monkeypatch.setattr(api, "BACKEND_NAMES", api.BACKEND_NAMES)
    monkeypatch.setattr(store, "_given", list(store._given))
    # The graph is made all the same; inductor's C++ compiler would take most of a minute.
    compiler = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    environment, modules = dict(os.environ), set(sys.modules)
    torch.manual_seed(0)
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name in set(sys.modules) - modules:
        if name.startswith("page_"):
            del sys.modules[name]
    monkeypatch.undo()
    api.forget()


WITH_CODE = [name for name, page in zip(NAMES, PAGES, strict=True) if blocks_of(page, "python")]


# From importing torch_geometric.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("name", WITH_CODE)
def test_python_blocks_run(name: str, device: str) -> None:
    """On a CPU; with ``-m gpu`` also those that need a GPU."""
    run_blocks(ROOT / name)
    if device == "cuda":
        multigather.check()


def test_blocks_that_need_something_are_few() -> None:
    needs = [need for page in PAGES for need, _ in compiled(page)]
    assert needs.count("") >= 30
    assert 3 <= needs.count(GPU) <= 8
    assert len(needs) - needs.count("") - needs.count(GPU) <= len(ELSEWHERE)


def test_code_blocks_name_their_language() -> None:
    known = {"python", "console", "text", "json"}
    for page in PAGES:
        found = {match[1] for match in BLOCK.finditer(page.read_text())}
        assert found <= known, f"{page}: {found - known}"


# ---- links ----------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))


@functools.cache
def anchors_of(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as code hosts and mkdocs make them alike."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")
        for heading in headings
    )


@pytest.mark.parametrize("name", NAMES)
def test_links_and_anchors_exist(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        address = urllib.parse.urlsplit(link)
        if address.scheme:
            continue
        target = (page.parent / address.path).resolve() if address.path else page
        assert target.exists(), f"{name}: {link} is not there"
        assert target.is_relative_to(ROOT), f"{name}: {link} is outside the repository"
        if address.fragment:
            assert address.fragment in anchors_of(target), f"{name}: {link} has no such heading"


def test_named_files_exist() -> None:
    """Paths of the repository in `code`."""
    folders = "multigather|kernels|tuning_cache|tests|tools|docs|examples|benchmarks"
    missing = {
        f"{name}: {found}"
        for name, page in zip(NAMES, PAGES, strict=True)
        for found in re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)", page.read_text())
        if not (ROOT / found).exists()
    }
    assert not missing


class Page(html.parser.HTMLParser):
    """Links and anchors of an HTML page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := facts.get(key))}
        self.links += [value for key in ("href", "src") if (value := facts.get(key))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra docs)")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (extra docs)")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_builds_and_its_links_lead_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > len(PAGES) - 1
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute
            continue
        for link in page.links:
            address = urllib.parse.urlsplit(link)
            if address.scheme or address.netloc or link.startswith("data:"):
                continue
            place = urllib.parse.unquote(address.path)
            target = (path.parent / place).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {link}"
            if address.fragment and target in pages:
                assert address.fragment in pages[target].anchors, f"{path.name}: {link}"


def test_site_asks_no_other_server(site: Path) -> None:
    """Neither fonts nor scripts: the pages can be read without a network."""
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link)[^>]*(?:src|href)=\"?(https?://[^\s\">]+)", path.read_text()
        )
        assert not loaded, f"{path.name}: {loaded}"


# ---- nothing is missing ---------------------------------------------------------------------


def test_public_names_are_in_the_reference(site: Path) -> None:
    anchors = Page(site / "api.html").anchors
    for name in multigather.__all__:
        if name != "__version__":
            # Functions that share their name with a module are found where they are written.
            places = {getattr(getattr(multigather, name), "__module__", ""), "multigather"}
            assert {f"{place}.{name}" for place in places} & anchors, name
    for module in ("torchrl", "pyg", "sglang"):
        assert any(each.startswith(f"multigather.integrations.{module}.") for each in anchors)


def test_commands_and_variables_are_in_the_reference() -> None:
    typer = pytest.importorskip("typer")
    from multigather.cli import app

    text = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"^\| `multigather ([a-z]+)`", text, re.MULTILINE)) == set(
        typer.main.get_command(app).commands
    )
    read = {
        name
        for path in (ROOT / "multigather").rglob("*.py")
        for name in re.findall(r'environ(?:\.get\(|\[)"(MULTIGATHER_\w+)"', path.read_text())
    }
    assert len(read) >= 6
    assert set(re.findall(r"^\| `(MULTIGATHER_\w+)", text, re.MULTILINE)) == read


def test_numbers_that_the_code_has() -> None:
    text = (ROOT / "docs" / "dispatch.md").read_text()
    small, large = _cupy.SMALL_CAPACITY, _cupy.LARGE_CAPACITY
    told = f"{small} with 4 KiB of parameters, {large} from CUDA 12.1 on, {_triton.CAPACITY} for"
    assert told in text
    text = (ROOT / "docs" / "packed.md").read_text()
    assert f"from {_cupy.PACKED_FROM:,} indices on" in text
    assert f"buffers of up to {PACKED_BYTES} bytes a row" in text
    text = (ROOT / "docs" / "tuning.md").read_text()
    assert f"more than {decide.MARGIN:.0%}".replace("%", " %") in text
    assert f"for about {online.SECONDS:.0f} s" in text


def test_every_page_is_in_the_navigation() -> None:
    yaml = pytest.importorskip("yaml")

    def pages(items: object) -> Iterator[str]:
        if isinstance(items, str):
            yield items
        for each in items.values() if isinstance(items, dict) else ():
            yield from pages(each)
        for each in items if isinstance(items, list) else ():
            yield from pages(each)

    found = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(found) == len(set(found))
    expected = {name.removeprefix("docs/") for name in NAMES} - {"README.md"}
    assert set(found) == expected


def test_shell_completion_knows_the_commands() -> None:
    pytest.importorskip("typer")
    program = "import sys; sys.argv = ['multigather']; from multigather.cli import main; main()"
    # What bash asks at Tab.
    asked = {"COMP_WORDS": "multigather tu", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked, "_MULTIGATHER_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["tune"], done.stderr


def test_issue_forms_ask_for_what_the_commands_print() -> None:
    yaml = pytest.importorskip("yaml")
    for name in ("bug", "performance"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= set(form)
        asked = {field["id"] for field in form["body"]}
        assert {"info", "explain", "paths"} <= asked


def test_pre_commit_runs_what_make_lint_runs() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    linted = {
        line.strip().removeprefix("$(VENV)/bin/").removesuffix(" .") for line in recipe.splitlines()
    }
    entries = {
        hook["entry"].removeprefix(".venv/bin/").replace("--force-exclude", "") for hook in hooks
    }
    assert {" ".join(entry.split()) for entry in entries} == linted


# ---- the backend that docs/backends.md makes -------------------------------------------------


@pytest.fixture
def page(sandbox: None) -> types.ModuleType:
    return run_blocks(ROOT / "docs" / "backends.md")


@pytest.mark.parametrize("operation", ["take", "index"])
@pytest.mark.parametrize("bounds", ["raise", "fill", "clip"])
def test_documented_backend_keeps_the_contract(
    page: types.ModuleType, bounds: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, shapes, strides, modes, out= and errors, as of any backend."""
    config = page.NumpyConfig(operation)
    monkeypatch.setattr(page.NumpyBackend, "space", lambda self: [config])
    api.forget()
    gather = functools.partial(multigather.gather, bounds=bounds, backend="numpy")
    slabs = [
        Slab(40, shape, dtype, gap=gap, seed=number)
        for number, (dtype, shape, gap) in enumerate(
            (dtype, shape, gap)
            for dtype in page.KNOWN
            for shape, gap in (((), 0), ((3,), 16), ((2, 5), 0))
        )
    ]
    buffers = [slab.tensor for slab in slabs] + [torch.ones(1, 4).expand(40, 4)]
    numbers = [3, 39, 0, 3] + ([-1, -40] if bounds == "raise" else [-1, 40, 99])
    for indices in (
        torch.tensor(numbers),
        torch.tensor(numbers, dtype=torch.int16)[::2],
        torch.tensor([numbers[:2], numbers[2:4]]),
        torch.tensor(5),
        torch.tensor([], dtype=torch.int64),
    ):
        results = gather(indices, *buffers)
        for result, buffer in zip(results, buffers, strict=True):
            assert_gathered(result, indices, buffer, bounds)
        outs = [
            torch.empty(*indices.shape, 2, *buffer.shape[1:], dtype=buffer.dtype).select(
                indices.dim(), 1
            )
            if indices.dim() == 1
            else torch.empty_like(result)
            for buffer, result in zip(buffers, results, strict=True)
        ]
        assert gather(indices, *buffers, out=outs) == tuple(outs)
        for out, buffer in zip(outs, buffers, strict=True):
            assert_gathered(out, indices, buffer, bounds)
    for slab in slabs:
        slab.assert_unchanged()
    if bounds == "raise":
        with pytest.raises(IndexError, match=r"indices\[1\] is 40, out of range for bufs\[0\]"):
            gather(torch.tensor([0, 40]), buffers[0])
    if bounds == "fill":
        (rows,) = gather(torch.tensor([0, 1]), torch.empty(0, 3))
        assert rows.tolist() == [[0.0] * 3] * 2


def test_documented_backend_is_refused_buffer_by_buffer(page: types.ModuleType) -> None:
    """By a rule it is chosen; what it does not know goes to the next one, in the same call."""
    unknown = [dtype for dtype in DTYPES if dtype not in page.KNOWN and not dtype.is_complex]
    others = [Slab(9, (2,), dtype).tensor for dtype in unknown]
    known = torch.arange(9.0)
    rule = rules.Rule("cpu", "numpy", {}, {"operation": "index"}, "a rule of this test")
    default = rules.default_rules()
    indices = torch.tensor([8, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "default_rules", lambda: (rule, *default))
        api.forget()
        explanation = multigather.explain(indices, known, *others)
        first, *rest = multigather.gather(indices, known, *others)
    follower = "native" if native.extension is not None else "torch"
    assert [pick["backend"] for pick in explanation.picks] == ["numpy", follower]
    assert explanation.picks[0]["buffers"] == ("bufs[0]",)
    assert explanation.picks[0]["config"] == "operation=index"
    assert len(explanation.refused["numpy"]) == len(others)
    assert first.tolist() == [8.0, 0.0] and len(rest) == len(others)


def test_documented_backend_is_measured_by_the_tuner(page: types.ModuleType) -> None:
    request = shapes.request_of(torch.device("cpu"), 16, [(4, 8)])
    candidates, _ = measure.candidates_for(request, ("numpy",))
    assert [str(each) for each in candidates] == ["numpy: operation=take", "numpy: operation=index"]
    measurement = measure.Bench(request).measure(candidates, rounds=1)
    assert not measurement.failed and len(measurement.timings) == 2


def test_documented_backend_refuses_bad_knobs(page: types.ModuleType) -> None:
    backend = page.NumpyBackend()
    for knobs in ({"operation": "steal"}, {"operation": 1}, {"blocks": 3}):
        with pytest.raises(ValueError, match=r"operation|blocks"):
            backend.config_from(knobs)
    text = next(text for _, text in blocks_of(ROOT / "docs" / "backends.md", "json"))
    assert backend.config_from(eval(text)["config"]) == page.NumpyConfig("take")
