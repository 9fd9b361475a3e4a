"""Varied real prompts for SmolLM2: languages, code, numbers, chats, and shared beginnings."""

_CHATS = (
    "What is the capital of France? Answer in one sentence.",
    "Explain to a ten-year-old why the sky is blue.",
    "Write a haiku about the first snow of the year.",
    "List five things to pack for a week in the mountains.",
    "How do I boil an egg so that the yolk stays soft?",
    "Give me three names for a small bakery near the sea.",
    "Was bedeutet das Sprichwort „Übung macht den Meister“?",
    "¿Qué diferencia hay entre el clima y el tiempo?",
    "Traduis en anglais : « Il pleut des cordes. »",
    "用一句话介绍长城。",
    "Is 221 a prime number? Show your reasoning step by step.",
    "Summarise the plot of Romeo and Juliet in two sentences. 🎭💔",
)

_TEXTS = (
    "The lighthouse keeper had not spoken to anyone for eleven days when",
    "Once upon a time, in a village at the edge of a dark forest, there lived",
    "def fibonacci(n: int) -> int:\n    ",
    "SELECT customer_id, SUM(amount) AS total\nFROM orders\n",
    "import numpy as np\n\ndef softmax(x):\n",
    '{"name": "Ada Lovelace", "born": 1815, "known_for": [',
    "<html>\n  <head>\n    <title>",
    "1, 1, 2, 3, 5, 8, 13,",
    "17 + 25 = 42\n18 + 26 = 44\n19 + 27 =",
    "Dear Mrs. Thompson,\n\nThank you for your letter of 3 March regarding",
    "The three laws of thermodynamics state that",
    "In 1969, the first humans to walk on the Moon were",
    "Q: What is photosynthesis?\nA:",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n- 1 pinch of salt\n\nMethod:\n1.",
    "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist",
    "a",
)

_PREAMBLE = (
    "You are the assistant of a public library. The library opens from nine to six on weekdays "
    "and from ten to four on Saturdays; it is closed on Sundays and on public holidays. Books "
    "may be kept for four weeks and renewed twice, unless another reader waits for them. "
    "Answer briefly and politely."
)

_QUESTIONS = (
    "When do you open on Saturday?",
    "When do you close on Saturday?",
    "How long may I keep a book?",
    "May I renew a book that somebody else is waiting for?",
    "Are you open on Christmas Day?",
    "Do you lend out films as well?",
    "How can I become a member?",
    "How long may I keep a book?",
)


def prompts() -> list[str]:
    """36 prompts as text; the chats are in SmolLM2's own format."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    chats = [_chat(system, text) for text in _CHATS]
    desk = [_chat(_PREAMBLE, text) for text in _QUESTIONS]
    return [*chats, *_TEXTS, *desk]


def _chat(system: str, user: str) -> str:
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )
