"""The chat of a model: its tokenizer and template, its think tags, and the prompts and texts that they make."""

from __future__ import annotations

import json
import re
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvatlas.answers.reading import Tags
from kvatlas.core import KvatlasError, digest, refusal
from kvatlas.models import weights
from kvatlas.models.files import ModelFiles
from kvatlas.models.load_options import OWN_VALUES
from kvatlas.models.thinking import Thinking, find_tags
from kvatlas.text import bytes_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Messages of `role`, `content` and further fields of a chat template; further values for it.
Messages = Sequence[Mapping[str, Any]]
Values = Mapping[str, Any]
_RANDOM = re.compile(r"\|\s*random\b|\blipsum\b")
#: Seconds of processor time for a chat template, which is code of the model; templates in use take milliseconds.
TEMPLATE_SECONDS = 5.0
#: Bytes of Python's memory for a chat template.
TEMPLATE_BYTES = 256 * 2**20
#: Bits of a number in a template, and entries of a repeated text or list: one operation on more takes seconds, too.
LARGEST = 10**6


#: Files with a vocabulary, of which a model has one.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@contextmanager
def _limits() -> Iterator[None]:
    """Raise TimeoutError in a template that this thread renders for more than `TEMPLATE_SECONDS`, and MemoryError when
    Python has more than `TEMPLATE_BYTES` for it.

    Each line of the template, and of Jinja's filters, looks at both, whatever thread runs it: alarms of the system
    reach the main thread alone. Other code is never interrupted: the garbage collector may run it in between.
    """
    import jinja2

    of_template = ("<template>", str(Path(jinja2.__file__).parent))
    end = time.thread_time() + TEMPLATE_SECONDS
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    most = tracemalloc.get_traced_memory()[0] + TEMPLATE_BYTES

    def look(frame: FrameType, *_: Any) -> Any:
        if not frame.f_code.co_filename.startswith(of_template):
            return None
        if time.thread_time() > end:
            raise TimeoutError(f"it did not end within {TEMPLATE_SECONDS:g} seconds")
        if tracemalloc.get_traced_memory()[0] > most:
            raise MemoryError(f"it needs more than {bytes_text(TEMPLATE_BYTES)}")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
        if not was_tracing:
            tracemalloc.stop()


def _multiply(left: Any, right: Any) -> Any:
    sizes = [value.bit_length() if isinstance(value, int) else 0 for value in (left, right)]
    for value, other in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(other, int):
            sizes = [len(value) * max(other, 0)]
    if sum(sizes) > LARGEST:
        raise OverflowError(f"a product is larger than {LARGEST:,}")
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > LARGEST:
        raise OverflowError(f"a power has more than {LARGEST:,} bits")
    return base**exponent


#: Operations of templates whose results have a limited size.
_BOUNDED = {"*": _multiply, "**": _power}


class Chat(ModelFiles):
    """The tokenizer, chat template and think tags in the files of a model."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded from the folder alone, never from the network."""
        from transformers import AutoConfig, AutoTokenizer

        name = self.name
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            with refusal(f"The tokenizer of the model {name!r} cannot be loaded"):
                tokenizer = AutoTokenizer.from_pretrained(self.folder, **options)
        except KvatlasError as error:
            # Without these files transformers lists the ways to make a tokenizer.
            if not any((self.folder / file).is_file() for file in TOKENIZER_FILES):
                raise KvatlasError(
                    f"The folder of the model {name!r} has no tokenizer; copy tokenizer.json and tokenizer_config.json "
                    f"of that model to {str(self.folder)!r}."
                ) from error
            # transformers reads the config of the model, too, whose faults are no faults of the tokenizer.
            with refusal(f"The config.json of the model {name!r} cannot be read"):
                AutoConfig.from_pretrained(self.folder, **options)
            raise

        # The user's template goes before the adapter's, and that before the tokenizer's own.
        template = self.adapter.folder / weights.TEMPLATE
        if self.options.adapter and template.is_file():
            tokenizer.chat_template = template.read_text("utf-8")
        address = self.options.template
        if address:
            file = Path(address).expanduser()
            with refusal(f"template: {address!r} cannot be read", OSError, ValueError):
                if file.exists() and not file.is_file():
                    # A pipe would wait for its writer.
                    raise OSError("it is no regular file")
                tokenizer.chat_template = file.read_text("utf-8")
        if not tokenizer.chat_template:
            raise KvatlasError(
                f"The tokenizer of the model {name!r} has no chat template; give a Jinja file with --template, or "
                "the model option template."
            )
        return tokenizer

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 over all that changes how the loaded tokenizer encodes and decodes, and its template, whatever its
        files: part of the run key."""
        tokenizer = self.tokenizer
        plain = [getattr(tokenizer, name, None) for name in ("clean_up_tokenization_spaces", "split_special_tokens")]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # Each call sets truncation and padding.
            encoding: list[Any] = [{**json.loads(backend.to_str()), "truncation": None, "padding": None}, *plain]
        else:
            with TemporaryDirectory() as folder:
                vocabulary = sorted(weights.sha256(Path(file)) for file in tokenizer.save_vocabulary(folder))
            added = {token: repr(text) for token, text in tokenizer.added_tokens_decoder.items()}
            arguments = tokenizer.init_kwargs
            values = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float)}
            encoding = [type(tokenizer).__name__, vocabulary, added, values, *plain]
        return digest([encoding, self._special, self.template])

    def check_chat(self) -> None:
        """Raise KvatlasError for faults of tokenizer, stop tokens and template."""
        _ = self.thinking
        _ = self.stops
        content = "kvatlas asks 7 questions"
        message = [{"role": "user", "content": content}]
        text = self.render(message)
        again = self.render(message)
        with refusal(f"The tokenizer of the model {self.name!r} cannot read a prompt"):
            self.tokens(text)

        unread = [name for name, _ in self.options.template_values if name not in self.template_variables]
        if unread:
            read = ", ".join(sorted(self.template_variables)) or "none"
            raise KvatlasError(
                f"The chat template of the model {self.name!r} does not read {unread[0]!r} of template_values; "
                f"it reads {read}."
            )

        # Addresses of objects and random words may repeat in one process, but not in the next.
        varies = text != again or " at 0x" in text or _RANDOM.search(self.template)
        if varies or not text.strip():
            fault = "another prompt each time" if varies else "an empty prompt"
            raise KvatlasError(f"The chat template of the model {self.name!r} renders {fault}.")
        if "".join(content.casefold().split()) not in "".join(text.casefold().split()):
            raise KvatlasError(
                f"The chat template of the model {self.name!r} leaves out the message of the user; the beginning "
                f"of its prompt is {text[:60]!r}."
            )

    @cached_property
    def thinking(self) -> Thinking:
        """The think tags of the model."""
        return find_tags(self.tokenizer, self.options.think_close)

    @cached_property
    def think_close(self) -> int | None:
        """The id of the token that ends thinking; None if several tokens end it, -1 if there are no think tags.

        It is an added token, which never merges with its neighbours.
        """
        close = self.thinking.close
        return self.tokenizer.added_tokens_encoder.get(close) if close else -1

    @cached_property
    def opens_thinking(self) -> bool:
        """True if the prompt itself opens thinking."""
        opening = self.thinking.open
        return bool(opening) and self.prompt("x").rstrip().endswith(opening)

    @property
    def tags(self) -> Tags:
        """The think tags, with which texts of the model are read."""
        return Tags(self.thinking.open, self.thinking.close, self.opens_thinking)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Ids of the tokens that end a trace: the generation config's, else the tokenizer's.

        Raises KvatlasError if there are none, and for other data.
        """
        file = "generation_config.json"
        ends = self.read_json(file).get("eos_token_id") if (self.folder / file).is_file() else None
        ends = self.tokenizer.eos_token_id if ends is None else ends
        if ends is None:
            raise KvatlasError(f"The model {self.name!r} names no end-of-text token (eos_token_id).")
        stops = ends if isinstance(ends, list) else [ends]
        if not stops or any(type(token) is not int or not 0 <= token < 2**31 for token in stops):
            raise KvatlasError(f"The model {self.name!r} has eos_token_id {ends!r}; expected token ids.")
        return frozenset(stops)

    def prompt(self, message: str) -> str:
        """Return one user message through the chat template, up to where the model begins to write."""
        return self.conversation([{"role": "user", "content": message}])

    def conversation(self, messages: Messages, values: Values | None = None) -> str:
        """Return the prompt of several messages, with further `values` for the template."""
        system = self.options.system
        if system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
        text = self.render(messages, values=values)
        opening = self.options.think_open
        return text if not opening or text.endswith(opening) else f"{text}{opening}"

    def render(self, messages: Messages, *, answering: bool = True, values: Values | None = None) -> str:
        """Render messages by the chat template in Jinja's sandbox, up to where an answer begins if `answering`.

        Raises KvatlasError if the template refuses the messages.
        """
        defaults = {
            "tools": None,
            "strftime_now": date.fromisoformat(self.options.date).strftime,
            **self.tokenizer.special_tokens_map,
            **dict(self.options.template_values),
        }
        conversation = {"messages": messages, "documents": None, "add_generation_prompt": answering}
        # A template may raise anything.
        with refusal(f"The chat template of {self.name!r} refuses these messages", Exception):
            compiled = self._compiled
            with _limits():
                return str(compiled.render({**defaults, **(values or {}), **conversation}))

    @cached_property
    def _compiled(self) -> Any:
        """The chat template in the environment of transformers, with numbers of limited size."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template("").environment
        environment.intercepted_binops = frozenset(_BOUNDED)
        environment.binop_table.update(_BOUNDED)
        return environment.from_string(self.template)

    @cached_property
    def prompt_identity(self) -> dict[str, Any]:
        """All that decides the prompt of messages, besides the tokenizer: part of the run key."""
        options = self.options
        identity: dict[str, Any] = {
            "template": self.template,
            "special": self._special,
            "date": options.date if self.asks_for_date else None,
            "opening": options.think_open,
        }

        # The keys of runs without a system message and values of the user have no entries for them.
        if options.system:
            identity["system"] = options.system
        if options.template_values:
            identity["values"] = dict(options.template_values)
        return identity

    @property
    def asks_for_date(self) -> bool:
        """True if the chat template contains the date of today."""
        return "strftime_now" in self.template

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads and that template_values can set."""
        from jinja2 import TemplateError, meta

        with refusal(f"The chat template of {self.name!r} cannot be read", TemplateError):
            environment = self._compiled.environment
            names = meta.find_undeclared_variables(environment.parse(self.template))
        return frozenset(names - {*OWN_VALUES, *self.tokenizer.special_tokens_map, *environment.globals})

    @property
    def _special(self) -> dict[str, str]:
        return {name: str(text) for name, text in self.tokenizer.special_tokens_map.items()}

    @cached_property
    def template(self) -> str:
        """The chat template. Raises KvatlasError if the tokenizer has several without a default."""
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError as error:
            raise KvatlasError(f"The tokenizer of the model {self.name!r} has no default chat template.") from error

    def encode(self, message: str) -> tuple[int, ...]:
        """Return the token ids of the prompt of one user message."""
        return self.tokens(self.prompt(message))

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without chat template and special tokens."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(int(i) for i in ids)

    def reads(self, text: str) -> bool:
        """Return True if a text is the same after encoding and decoding, apart from case and spaces."""
        # Not `tokens`, which warns of texts that are longer than the context.
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        back = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        return "".join(back.casefold().split()) == "".join(text.casefold().split())

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of new tokens without the end token."""
        visible = tokens[:-1] if tokens and tokens[-1] in self.stops else tokens
        return str(self.tokenizer.decode(list(visible), skip_special_tokens=False))
