"""What is installed, what imports what, and what a reader finds in each folder."""

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "optax_sr8bit"
KERNELS = ROOT / "kernels" / "optax_sr8bit_kernels"
FOLDERS = ("optax_sr8bit", "kernels", "examples", "tests")
MAX_LINES = 300

# Which distributions each package may import, besides the standard library and itself.
ALLOWED = {
    LIBRARY: {"jax", "numpy", "optax", "optax_sr8bit_kernels"},
    KERNELS: {"jax", "jax_triton", "numpy", "triton"},
}

# Modules and subpackages of optax_sr8bit from the lowest up: each imports only itself and what stands before it.
LAYERS = [
    "registry",
    "bits",
    "rounding",
    "rule",
    "codecs",
    "seeds",
    "implementation",
    "options",
    "tile",
    "partition",
    "leaf",
    "groups",
    "plan",
    "manual",
    "placement",
    "state",
    "inputs",
    "hyperparameters",
    "in_place",
    "transform",
    "clipping",
    "state_shardings",
    "factory",
    "wrappers",
    "report",
    "master",
    "terminal",
    "signs",
    "stored",
    "slots",
    "quantize",
    "composite",
    "trust",
    "optimizers",
    "checkpoint",
]


def python_files(*folders):
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))


def relative(path):
    return path.relative_to(ROOT).as_posix()


def module_name(path):
    parts = path.relative_to(KERNELS.parent if KERNELS in path.parents else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """Every absolute name that a file imports, at its top or inside a function; `from a import b` gives `a.b`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist, and the wheel built from that sdist."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=out, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_the_wheel_installs_exactly_two_packages(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = wheel.namelist()
    top = {name.split("/")[0] for name in names}
    (dist_info,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {"optax_sr8bit", "optax_sr8bit_kernels", dist_info}
    assert {"optax_sr8bit/py.typed", "optax_sr8bit_kernels/py.typed"} <= set(names)
    assert f"{dist_info}/licenses/LICENSE" in names
    wanted = {module_name(path) for path in python_files(LIBRARY, KERNELS)}
    stems = [name.removesuffix(".py").removesuffix("/__init__") for name in names if name.endswith(".py")]
    got = {stem.replace("/", ".") for stem in stems}
    assert got == wanted


def test_the_wheel_has_the_version_of_the_source(distributions):
    source = (LIBRARY / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert distributions[1].name == f"optax_sr8bit-{version}-py3-none-any.whl"


def test_the_sdist_has_tests_examples_and_readme(distributions):
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    missing = {relative(path) for path in python_files(*(ROOT / folder for folder in FOLDERS))} - names
    assert not missing


@pytest.mark.parametrize("package", ALLOWED, ids=lambda path: path.name)
def test_each_package_imports_only_what_it_may(package):
    allowed = ALLOWED[package] | {package.name} | sys.stdlib_module_names
    wrong = [
        f"{relative(path)} imports {name}"
        for path in python_files(package)
        for name in imported(path)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong


def test_imports_of_the_library_point_down():
    rank = {name: place for place, name in enumerate(LAYERS)}
    rank["__init__"] = len(LAYERS)  # the public names stand on everything
    wrong = []
    for path in python_files(LIBRARY):
        own = path.relative_to(LIBRARY).with_suffix("").parts[0]
        if own not in rank:
            wrong.append(f"{relative(path)}: give {own} its place in LAYERS")
            continue
        for name in imported(path):
            package, _, rest = name.partition(".")
            if package != LIBRARY.name:
                continue
            # A name that is no layer is one of the public names of __init__.
            if rank.get(rest.split(".")[0], len(LAYERS)) > rank[own]:
                wrong.append(f"{relative(path)} imports {name}")
    assert not wrong
    assert not [name for name in LAYERS if not (LIBRARY / name).is_dir() and not (LIBRARY / f"{name}.py").is_file()]


def test_no_file_of_the_packages_is_long():
    files = python_files(LIBRARY, KERNELS)
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {path: count for path, count in lines.items() if count > MAX_LINES}


def test_every_folder_has_a_readme():
    folders = {ROOT / folder for folder in FOLDERS}
    folders |= {path.parent for path in python_files(*folders)}
    assert not sorted(relative(folder) for folder in folders if not (folder / "README.md").is_file())


def test_documents_name_nobodys_home_directory():
    documents = [*ROOT.glob("*.md"), *(path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*.md"))]
    assert ROOT / "README.md" in documents
    home = re.compile(r"(?<![\w.])/(home|Users|root)/|[A-Za-z]:\\Users\\")
    assert not [relative(path) for path in documents if home.search(path.read_text(encoding="utf-8"))]


def test_kernels_is_no_module():
    assert not (ROOT / "kernels" / "__init__.py").exists()
