"""Loading the tokenizer of a checkpoint; torch is not needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

from stride_cli.errors import ModelError, first_line, require_extra
from stride_cli.models.configuration import own_config, quiet_transformers, read_object
from stride_cli.models.language.files import Source, code_refused, find_checkpoint
from stride_cli.models.spec import GivenModel
from stride_cli.startup import without_collection

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
    "tekken.json",
)


def load_tokenizer(model: GivenModel) -> Any:
    """The checkpoint's own tokenizer (a fast one where there is one); ModelError if it has none."""
    return tokenizer_of(find_checkpoint(model))


def tokenizer_of(source: Source) -> Any:
    """`load_tokenizer` of a checkpoint that was found."""
    own = own_tokenizer(source, transformers_tokenizer)
    return transformers_tokenizer(source) if own is None else own


@without_collection()  # most of it is importing
def transformers_tokenizer(source: Source) -> Any:
    """transformers' own tokenizer of a checkpoint; refused as by `load_tokenizer`."""
    from transformers import AutoTokenizer

    if source.gguf is None and not any((source.directory / name).is_file() for name in _TOKENIZER_FILES):
        if source.base is not None:
            return tokenizer_of(source.base)
        raise ModelError(
            f"'{source.given}' has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})",
            fix=f"save the model's tokenizer beside its weights: tokenizer.save_pretrained('{source.given}')",
        )
    check_gguf(source)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(source.directory, **source.options)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise code_refused(source.given, source.directory / "tokenizer_config.json", None) from error
        raise ModelError(
            f"the tokenizer of '{source.given}' cannot be loaded: {first_line(error)}",
            fix="it is damaged, or no GGUF: copy the file again"
            if source.gguf
            else "its files are damaged, or need a package that is not installed: save the tokenizer again",
        ) from error


def check_gguf(source: Source) -> None:
    """MissingExtraError where a .gguf file cannot be read for want of a package."""
    if source.gguf is None:
        return
    for module in ("gguf", "accelerate"):  # transformers reads GGUF with both
        if importlib.util.find_spec(module) is None:
            raise require_extra(module, "gguf")


# keys of the tokenizer_config.json that `stride model train` writes; with others, transformers reads it
_SETTINGS = {
    *("backend", "tokenizer_class", "bos_token", "eos_token", "extra_special_tokens", "model_max_length"),
    *("clean_up_tokenization_spaces", "is_local", "local_files_only"),
}
_PLAIN = {"verbose", "return_attention_mask", "return_token_type_ids"}  # which change no token


class CharSpan(NamedTuple):
    """The characters of a token, as transformers calls them."""

    start: int
    end: int


class Encoded(dict[str, Any]):
    """``input_ids`` of a text or of several, and the characters of each token."""

    def __init__(self, ids: list[Any], encodings: Sequence[Any]) -> None:
        super().__init__(input_ids=ids)
        self.input_ids = ids
        self._encodings = encodings

    def char_to_token(self, number: int, character: int) -> int | None:
        """Find the token of text `number` that has a character."""
        found: int | None = self._encodings[number].char_to_token(character)
        return found

    def token_to_chars(self, number: int, token: int) -> CharSpan | None:
        """Find the characters of a token of text `number`."""
        found = self._encodings[number].token_to_chars(token)
        return None if found is None else CharSpan(*found)


class OwnTokenizer:
    """A tokenizer as the rest of STRIDE uses one; all but plain encoding and decoding is transformers'.

    Of tokenizer.json, tokenizer_config.json and a template of conversations; `whole` loads transformers'
    tokenizer, once something else is asked for.
    """

    calls_its_backend = True
    split_special_tokens = False

    def __init__(
        self, backend: Any, settings: dict[str, Any], template: str | None, whole: Callable[[], Any]
    ) -> None:
        self.backend_tokenizer, self.chat_template, self._load = backend, template, whole
        self.special_tokens_map = {name: settings[name] for name in ("bos_token", "eos_token")}
        self.bos_token, self.eos_token = self.special_tokens_map.values()
        special = [self.bos_token, self.eos_token, *settings.get("extra_special_tokens", [])]
        self.all_special_tokens = list(dict.fromkeys(special))
        self.all_special_ids = [backend.token_to_id(token) for token in self.all_special_tokens]
        self.bos_token_id, self.eos_token_id = map(backend.token_to_id, (self.bos_token, self.eos_token))

    @cached_property
    def whole(self) -> Any:
        """The tokenizer of transformers."""
        return self._load()

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        added: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def __call__(self, text: Any, *, add_special_tokens: bool = True, **options: Any) -> Any:
        plain = not add_special_tokens and options.keys() <= _PLAIN and text
        if not plain:
            return self.whole(text, add_special_tokens=add_special_tokens, **options)
        several = not isinstance(text, str)
        encodings = self.backend_tokenizer.encode_batch(
            list(text) if several else [text], add_special_tokens=False
        )
        ids = [encoding.ids for encoding in encodings]
        return Encoded(ids if several else ids[0], encodings)

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        listed = ids.tolist() if hasattr(ids, "tolist") else ids
        listed = [listed] if isinstance(listed, int) else list(listed)
        found: str = self.backend_tokenizer.decode(listed, skip_special_tokens=skip_special_tokens)
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("whole", "backend_tokenizer"):  # being made, or copied
            raise AttributeError(name)
        return getattr(self.whole, name)


def own_tokenizer(source: Source, whole: Callable[[Source], Any]) -> OwnTokenizer | None:
    """Load the tokenizer of a checkpoint of our own; None of any other, and of a damaged one, of which
    transformers says what is wrong."""
    if source.gguf is not None or own_config(source.directory) is None:
        return None
    settings = read_object(source.directory / "tokenizer_config.json") or {}
    if not settings.keys() <= _SETTINGS or settings.get("clean_up_tokenization_spaces") is not False:
        return None
    from tokenizers import Tokenizer

    template = source.directory / "chat_template.jinja"
    try:
        return OwnTokenizer(
            Tokenizer.from_file(str(source.directory / "tokenizer.json")),
            settings,
            template.read_text(encoding="utf-8") if template.is_file() else None,
            partial(whole, source),
        )
    except Exception:  # tokenizers raises plain Exception
        return None
