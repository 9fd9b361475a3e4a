"""`tandem chat`: a conversation through pipes, as scripts and tests hold it."""

from shared.errors import UnavailableError
from tests.cli.fake_gateway import FakeGateway
from tests.cli.terminal import Terminal, tandem


def conversation_of(gateway: FakeGateway, index: int) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in gateway.requests[index].chat.messages]


async def test_a_second_question_carries_the_conversation(fake_gateway: FakeGateway) -> None:
    run = await tandem("chat", "--address", fake_gateway.address, stdin=b"one\n\ntwo\n")
    assert (run.code, run.out) == (0, "Paris.\nParis.\n")
    assert conversation_of(fake_gateway, 0) == [("user", "one")]
    assert conversation_of(fake_gateway, 1) == [
        ("user", "one"),
        ("assistant", "Paris."),
        ("user", "two"),
    ]


async def test_reset_forgets_and_system_stays(fake_gateway: FakeGateway) -> None:
    stdin = b"/system Be brief.\none\n/reset\ntwo\n/quit\nthree\n"
    await tandem("chat", "--address", fake_gateway.address, stdin=stdin)
    assert len(fake_gateway.requests) == 2
    assert conversation_of(fake_gateway, 1) == [("system", "Be brief."), ("user", "two")]


async def test_an_unknown_command_is_said_and_not_sent(fake_gateway: FakeGateway) -> None:
    run = await tandem("chat", "--address", fake_gateway.address, stdin=b"/rest\n/help\n")
    assert "unknown command /rest" in run.err
    assert "/reset" in run.err
    assert not fake_gateway.requests


async def test_a_failed_answer_leaves_the_conversation_as_it_was(
    fake_gateway: FakeGateway,
) -> None:
    fake_gateway.error = UnavailableError("no worker is ready")
    terminal = await Terminal.start("chat", "--address", fake_gateway.address)
    terminal.type("one")
    await terminal.read_err("no worker is ready")
    fake_gateway.error = None
    terminal.type("two")
    assert (await terminal.end()).code == 0
    assert conversation_of(fake_gateway, 1) == [("user", "two")]


async def test_ctrl_c_stops_the_answer_and_not_the_program(fake_gateway: FakeGateway) -> None:
    fake_gateway.go_on.clear()
    terminal = await Terminal.start("chat", "--address", fake_gateway.address)
    terminal.type("one")
    await terminal.read("Par")
    terminal.interrupt()
    await terminal.read_err("stopped")
    await fake_gateway.cancelled.wait()
    fake_gateway.go_on.set()
    terminal.type("two")
    run = await terminal.end()
    assert (run.code, run.out) == (0, "\nParis.\n")
    assert conversation_of(fake_gateway, 1)[:2] == [("user", "one"), ("assistant", "Par")]
