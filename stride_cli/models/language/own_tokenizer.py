"""The tokenizer of a checkpoint that `stride model train` wrote, without transformers.

A plain one is its tokenizer.json, read by the `tokenizers` library, with little around it; here is what is
asked of it, with transformers' answers. For all else, and to be saved, transformers' own is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stride_cli.corpus.own_config import own_config, read_object
from stride_cli.models.language.files import Source

_SETTINGS = frozenset(
    (
        *("backend", "tokenizer_class", "bos_token", "eos_token", "extra_special_tokens", "model_max_length"),
        *("clean_up_tokenization_spaces", "is_local", "local_files_only"),
    )
)
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# of what transformers may read in a directory, what a plain checkpoint has
_FILES = frozenset(
    (
        *("config.json", "generation_config.json", "model.safetensors", "stride_recipe.json"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    )
)
_READ = (".json", ".jinja", ".safetensors", ".bin", ".model", ".txt", ".gguf", ".py", ".tiktoken")
# transformers corrects the pattern of larger ones, where they look like Mistral's
_LARGEST = 100_000
_CALL = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
# what a chat template may ask for; more than that is a matter for transformers
_GIVEN = {"messages", "add_generation_prompt", "bos_token", "eos_token"}
_SAFE_JINJA = (3, 1, 6)  # before, a template could leave the sandbox; transformers refuses older ones


class CharSpan(NamedTuple):
    """The characters of a token, as transformers calls them."""

    start: int
    end: int


class Encoded(dict[str, Any]):
    """``input_ids`` of a text, or of each of several; the places of characters, of several."""

    def __init__(self, ids: list[Any], encodings: Sequence[Any]) -> None:
        super().__init__(input_ids=ids)
        self.input_ids = ids
        self._encodings = encodings

    def char_to_token(self, number: int, character: int) -> int | None:
        """The token of text `number` that has a character."""
        found: int | None = self._encodings[number].char_to_token(character)
        return found

    def token_to_chars(self, number: int, token: int) -> CharSpan | None:
        """The characters of a token of text `number`."""
        found = self._encodings[number].token_to_chars(token)
        return None if found is None else CharSpan(*found)


class OwnTokenizer:
    """What is asked of a tokenizer.

    Parameters
    ----------
    source : Source
    others : callable        gives transformers' own tokenizer of the source, where that is needed
    backend : Tokenizer      of tokenizer.json
    named : dict             ``bos_token`` and ``eos_token``
    extra : sequence of str  special tokens without a name
    """

    calls_its_backend = True
    split_special_tokens = False

    def __init__(
        self,
        source: Source,
        others: Callable[[Source], Any],
        backend: Any,
        named: dict[str, str],
        extra: Sequence[str],
    ) -> None:
        self._source, self._others = source, others
        self.backend_tokenizer = backend
        self.special_tokens_map = named
        self.all_special_tokens = list(dict.fromkeys((*named.values(), *extra)))
        self.all_special_ids = [backend.token_to_id(token) for token in self.all_special_tokens]
        self.bos_token, self.eos_token = named["bos_token"], named["eos_token"]
        self.bos_token_id, self.eos_token_id = map(backend.token_to_id, (self.bos_token, self.eos_token))
        template = source.directory / "chat_template.jinja"
        self.chat_template = template.read_text(encoding="utf-8") if template.is_file() else None

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        added: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    def __call__(self, text: Any, **options: Any) -> Any:
        several = isinstance(text, list | tuple)
        texts = list(text) if several else [text]
        wanted = {name: value for name, value in options.items() if name != "verbose"}
        if (
            not texts
            or not all(isinstance(part, str) for part in texts)
            or not {"add_special_tokens": False}.items() <= wanted.items() <= _CALL.items()
        ):
            return self.whole(text, **options)
        encodings = self.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        return Encoded(ids if several else ids[0], encodings)

    def decode(self, ids: Any, *, skip_special_tokens: bool = False, **options: Any) -> Any:
        listed = ids.tolist() if hasattr(ids, "tolist") else ids
        listed = [listed] if isinstance(listed, int) else list(listed)
        if options or not all(issubclass(kind, int) for kind in set(map(type, listed))):
            return self.whole.decode(ids, skip_special_tokens=skip_special_tokens, **options)
        return self.backend_tokenizer.decode(listed, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Any, *, add_generation_prompt: bool = False, tokenize: bool = True, **options: Any
    ) -> Any:
        wanted = {} if not tokenize else {"return_dict": False}
        if self._rendered is None or options != wanted or not _plain_chat(messages):
            options |= {"add_generation_prompt": add_generation_prompt, "tokenize": tokenize}
            return self.whole.apply_chat_template(messages, **options)
        text = self._rendered(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map,
        )
        return self(text, add_special_tokens=False)["input_ids"] if tokenize else text

    @cached_property
    def _rendered(self) -> Callable[..., str] | None:
        return None if self.chat_template is None else _compiled(self.chat_template)

    @cached_property
    def whole(self) -> Any:
        """The tokenizer of transformers."""
        return self._others(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":  # of an object that is being made, or copied
            raise AttributeError(name)
        return getattr(self.whole, name)


def own_tokenizer(source: Source, others: Callable[[Source], Any]) -> OwnTokenizer | None:
    """A plain checkpoint's tokenizer; None of any other, damaged ones too. `others`: see `OwnTokenizer`."""
    directory = source.directory
    if source.gguf is not None or not plain_directory(directory) or own_config(directory) is None:
        return None
    settings = read_object(directory / "tokenizer_config.json")
    if settings is None or not _plain_settings(settings):
        return None
    try:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
        named = {name: settings[name] for name in ("bos_token", "eos_token")}
        extra = settings.get("extra_special_tokens", [])
        found = OwnTokenizer(source, others, backend, named, extra)
    except Exception:  # transformers says what is wrong
        return None
    return found if _plain_backend(found) else None


def plain_directory(directory: Path) -> bool:
    """Whether transformers would read nothing in it but what a plain checkpoint has."""
    names = {path.name for path in directory.iterdir()}
    read = {name for name in names if name.endswith(_READ)}
    return read <= _FILES and "additional_chat_templates" not in names


def _plain_settings(settings: dict[str, Any]) -> bool:
    extra = settings.get("extra_special_tokens", [])
    return (
        settings.keys() <= _SETTINGS
        and settings.get("tokenizer_class") in _CLASSES
        and settings.get("backend", "tokenizers") == "tokenizers"
        and settings.get("clean_up_tokenization_spaces") is False
        and isinstance(extra, list)
        and all(isinstance(token, str) for token in (settings.get("bos_token"), settings.get("eos_token")))
        and all(isinstance(token, str) for token in extra)
    )


def _plain_backend(found: OwnTokenizer) -> bool:
    """Whether transformers would change nothing of what the file says."""
    backend = found.backend_tokenizer
    added = {token.content: token for token in found.added_tokens_decoder.values()}
    special = [added.get(token) for token in found.all_special_tokens]
    return (
        backend.truncation is None
        and backend.padding is None
        and backend.post_processor is not None
        and len(found) <= _LARGEST
        and all(
            token is not None
            and token.special
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            for token in special
        )
    )


def _plain_chat(messages: Any) -> bool:
    """A conversation, none of whose messages transformers would change."""
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            type(message) is dict
            and message.keys() <= {"role", "content"}
            and all(type(value) is str for value in message.values())
            for message in messages
        )
    )


def _compiled(template: str) -> Callable[..., str] | None:
    """What renders a chat template, in the sandbox that transformers has for them; None of one that asks for
    what transformers adds to the language."""
    import jinja2
    from jinja2 import TemplateSyntaxError, meta, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < _SAFE_JINJA:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        parsed = environment.parse(template)
    except TemplateSyntaxError:
        return None
    filters = {found.name for found in parsed.find_all(nodes.Filter)}
    if meta.find_undeclared_variables(parsed) <= _GIVEN and "tojson" not in filters:
        rendered: Callable[..., str] = environment.from_string(template).render
        return rendered
    return None
