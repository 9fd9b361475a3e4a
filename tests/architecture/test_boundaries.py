"""Who may import whom, read from the sources; and what a process really loads."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from gateway.service import InferenceService
from worker.service import WorkerService

ROOT = Path(__file__).resolve().parent.parent.parent
# Imported by a name of its own: tandem_client.
CLIENT = ROOT / "gateway/client"
PACKAGES = ("gateway", "worker", "shared")
HEAVY = ("torch", "transformers")

# The only modules that see protobuf messages.
PB_USERS = {
    "gateway.cli",
    "gateway.convert",
    "gateway.option_checks",
    "gateway.server",
    "gateway.service",
    "gateway.validation",
    "gateway.worker_link",
    "gateway.worker_session",
    "tandem_client",
    "worker.convert",
    "worker.dispatcher",
    "worker.link",
    "worker.request_spans",
    "worker.server",
    "worker.service",
}


def module_name(path: Path) -> str:
    root = CLIENT if CLIENT in path.parents else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of ours but the generated ones."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {
        module_name(path): ast.parse(path.read_text())
        for path in paths
        if ROOT / "shared/pb" not in path.parents
    }


def imported_by(module: str, *, lazily: bool = True) -> set[str]:
    """Full names of what a module imports; `from a import b` counts as a and as a.b."""
    tree = sources()[module]
    nodes = ast.walk(tree) if lazily else without_functions(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} imports relatively"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def without_functions(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported, and type-only imports too."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from without_functions(child)


def is_within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def modules_of(*prefixes: str) -> list[str]:
    found = [module for module in sources() if is_within(module, *prefixes)]
    assert found, prefixes
    return found


def offences(modules: list[str], *forbidden: str) -> list[str]:
    return [
        f"{module} imports {name}"
        for module in modules
        for name in sorted(imported_by(module))
        if is_within(name, *forbidden)
    ]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("gateway", ("worker", *HEAVY)),
        ("worker", ("gateway", "tandem_client")),
        ("shared", ("gateway", "worker", "tandem_client", *HEAVY)),
        ("worker.models", ("worker.engine", "worker.scheduler", "worker.engine_loop", "grpc")),
        ("worker.checkpoint", ("worker.engine", "worker.scheduler", "worker.engine_loop", "grpc")),
        ("worker.engine", ("worker.scheduler", "worker.engine_loop", "grpc", "asyncio")),
        ("worker.engine_loop", ("worker.engine", "grpc", "asyncio", "torch")),
        ("worker.structured", ("worker.engine", "worker.scheduler", "worker.engine_loop")),
        ("worker.structured", ("grpc", "asyncio", *HEAVY)),
    ],
)
def test_layers_do_not_reach_up_or_across(package: str, forbidden: tuple[str, ...]) -> None:
    assert not offences(modules_of(package), *forbidden)


def test_the_scheduler_is_pure_host_logic() -> None:
    allowed = ["worker.scheduler", "worker.step", "worker.messages", "shared.types"]
    allowed += ["shared.errors", "shared.prefix_hashes", "numpy"]
    foreign = [
        f"{module} imports {name}"
        for module in modules_of("worker.scheduler")
        for name in sorted(imported_by(module))
        if not is_within(name, *allowed) and name.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not foreign
    assert not offences(modules_of("worker.scheduler"), "threading", "asyncio", "multiprocessing")


def test_the_client_needs_grpc_protobuf_and_the_stubs_alone() -> None:
    allowed = ["tandem_client", "grpc", "grpc_health", "google.protobuf", "google.rpc"]
    allowed += ["shared.pb.tandem.v1", "shared.grpc_options"]
    foreign = [
        f"{module} imports {name}"
        for module in modules_of("tandem_client")
        for name in sorted(imported_by(module))
        # `from a import b` is said of a, too.
        if not any(is_within(name, part) or is_within(part, name) for part in allowed)
        and name.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not foreign


def test_only_the_edges_see_protobuf_messages() -> None:
    users = {
        module
        for module in sources()
        if any(is_within(name, "shared.pb") for name in imported_by(module))
    }
    assert not {user for user in users if not is_within(user, *PB_USERS)}


def test_only_the_factory_knows_the_backends() -> None:
    backends = ("worker.engine.cpu", "worker.engine.cuda", "worker.engine.echo")
    outside = [module for module in sources() if not is_within(module, "worker.engine")]
    assert not offences(outside, *backends)


def test_only_one_module_knows_the_grammar_library() -> None:
    others = [module for module in sources() if module != "worker.structured.library"]
    assert not offences(others, "llguidance")


def test_there_are_no_import_cycles() -> None:
    graph = {
        module: {name for name in imported_by(module, lazily=False) if name in sources()} - {module}
        for module in sources()
    }
    assert any(graph.values())
    assert import_cycle(graph) == []


def import_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a cycle, in its order; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_cycle_would_be_named() -> None:
    cycle = import_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()})
    assert set(cycle) == {"b", "c"}


@pytest.mark.parametrize(
    "modules", ["gateway.server, gateway.cli.main, gateway.__main__", "worker.__main__"]
)
def test_a_process_that_serves_grpc_loads_neither_torch_nor_transformers(modules: str) -> None:
    assert loaded_by(modules, *HEAVY) == []


def test_the_engine_process_has_no_grpc() -> None:
    # Its threads and its poller belong to the process that serves, and to no other.
    assert loaded_by("worker.engine_main, worker.engine_loop", "grpc") == []


def test_the_parent_of_gateway_processes_has_no_grpc() -> None:
    # It may start another at any time, and has nothing that could hang.
    assert loaded_by("gateway.__main__", "grpc", "uvloop") == []


def loaded_by(modules: str, *suspects: str) -> list[str]:
    """Which of the suspects a new process has after it has imported the modules."""
    program = f"import sys, {modules}; print(*[s for s in {suspects!r} if s in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize("service", [InferenceService, WorkerService])
def test_every_handler_is_a_coroutine_or_an_async_generator(service: type) -> None:
    # A plain function or generator runs on a thread, where cancelling it hangs the call.
    handlers = [
        function
        for name, function in vars(service).items()
        if name[0].isupper() and inspect.isroutine(function)
    ]
    assert len(handlers) == 8
    for handler in handlers:
        assert inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler), handler


def test_no_kernel_has_an_argument_that_tritons_launcher_shadows() -> None:
    # Its launcher binds these names itself: an argument so named arrives as a dict. The
    # interpreter has another launcher, so only a GPU would notice.
    shadowed = {"params", "specialization", "options"}
    found = [
        f"{path.name}: {function.name}({argument.arg})"
        for path in sorted((ROOT / "worker/engine/cuda").glob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        for argument in function.args.args
        if argument.arg in shadowed
    ]
    assert found == []
