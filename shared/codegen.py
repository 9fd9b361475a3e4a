"""Generates shared/pb from protos/: `python -m shared.codegen`.

The protos are mapped to the folder that their Python modules live in, so that protoc
itself writes the right imports and nothing has to edit its output.
"""

import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ("tandem/v1/inference.proto", "tandem/worker/v1/worker.proto")


def generate(destination: Path) -> None:
    """Writes the stubs under `destination`/shared/pb.

    Raises ImportError without grpcio-tools, which only developers need, and
    RuntimeError when protoc refuses a proto.
    """
    # Not a dependency of the services, so not imported with the module.
    from grpc_tools import protoc  # noqa: PLC0415

    sources = [f"shared/pb/{proto}" for proto in PROTOS]
    out = [f"--{kind}_out={destination}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-Ishared/pb={ROOT / 'protos'}", *out, *sources])
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


def main() -> int:
    generate(ROOT)
    print(f"generated {len(PROTOS)} protos with grpcio-tools {version('grpcio-tools')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
