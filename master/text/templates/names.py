"""Names in chat templates that a caller may not set: names of the server, Hugging Face, Jinja and Python."""

_GIVEN = {"messages", "replay", "tools", "bos_token", "eos_token", "add_generation_prompt", "continue_final_message"}
_GLOBALS = {"raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace"}
_OF_JINJA = {"self", "super", "loop", "caller", "varargs", "kwargs", "context", "environment"}
_WORDS = {
    *("and", "block", "break", "call", "continue", "do", "elif", "else", "endblock", "endcall", "endfilter", "endfor"),
    *(
        "endgeneration",
        "endif",
        "endmacro",
        "endset",
        "extends",
        "false",
        "False",
        "filter",
        "for",
        "from",
        "generation",
    ),
    *("if", "import", "in", "include", "is", "macro", "none", "None", "not", "or", "recursive", "set", "true", "True"),
}
RESERVED = frozenset(_GIVEN | _GLOBALS | _OF_JINJA | _WORDS)


def may_be_given(name: str) -> bool:
    """Return True if a caller may give a chat template a value of this name."""
    return name.isascii() and name.isidentifier() and not name.startswith("_") and name not in RESERVED
