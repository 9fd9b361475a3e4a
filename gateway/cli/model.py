"""`tandem model`: what a gateway serves."""

import json

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from gateway.cli.client import Client, Target
from shared.pb.tandem.v1 import inference_pb2 as pb


async def show_model(target: Target, *, as_json: bool) -> None:
    """Writes the model's description to stdout. Raises CallError."""
    async with Client(target) as client:
        model = await client.model()
    if as_json:
        print(json.dumps(_as_dict(model)))
    else:
        Console(highlight=False).print(_table(model))


def _as_dict(model: pb.GetModelResponse) -> dict[str, object]:
    return MessageToDict(
        model, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _table(model: pb.GetModelResponse) -> Table:
    table = Table("property", "value", title=model.model)
    for name, value in _as_dict(model).items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(name.replace("_", " "), shown)
    return table
