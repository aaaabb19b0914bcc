"""Documents to tokens to chunks: which tokens a chunk holds, and which of them are scored (ω)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stride_cli.corpus.documents import Document
from stride_cli.errors import CorpusError

Span = tuple[int, int]  # first and after the last, of characters or tokens
# private-use characters that stand around the contents while a chat template is taken apart
_OPEN, _CLOSE = "\ue0a0", "\ue0a1"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tokenised document.

    Attributes:
        tokens: (L,) int32, with one BOS in front where the tokenizer has one.
        scored: (L,) bool, the tokens whose loss counts (ω, paper app:token_masking): all of a text, only the
            answers of a prompt and response or a conversation. Never the first, which has nothing before it.
    """

    tokens: np.ndarray
    scored: np.ndarray


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous block of a document.

    Attributes:
        tokens: (L,) int32, 1 <= L <= block_size.
        loss_start: First scored position, at least 1 (the first token of a chunk is read without context); L
            when none is.
        loss_mask: (L,) uint8, 1 where a token is scored; None when that is loss_start … L-1.
    """

    tokens: np.ndarray
    loss_start: int
    loss_mask: np.ndarray | None

    @property
    def n_scored(self) -> int:
        """Count the scored tokens."""
        return len(self.tokens) - self.loss_start if self.loss_mask is None else int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Blocks:
    """The chunks of several documents, one after the other.

    Attributes:
        tokens: (T,) uint16 or uint32.
        lengths: (n,) int64, tokens of each chunk.
        loss_starts: (n,) int32.
        loss_masks: Chunk number → `Chunk.loss_mask`, of the chunks that have one.
        chunks_of, scored_of: (D,) int64, chunks and scored tokens of each document.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    loss_starts: np.ndarray
    loss_masks: dict[int, np.ndarray]
    chunks_of: np.ndarray
    scored_of: np.ndarray


class DocumentTokenizer:
    """Tokenises documents in batches with the checkpoint's own tokenizer, and cuts them into chunks.

    Args:
        tokenizer: Of transformers. Its chat template, where it has one, joins prompt and response, and
            messages; without one the parts are joined by line breaks. Special tokens written out in a text
            are read as such, as in training.
        block_size: Most tokens of a chunk.
    """

    def __init__(self, tokenizer: Any, *, block_size: int) -> None:
        if block_size < 2:
            raise CorpusError(
                f"the block size is {block_size}, expected at least 2 (a chunk's first token is not scored)",
                fix="give --block-size 512, or leave it out",
            )
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.bos: int | None = tokenizer.bos_token_id
        # ids need not be contiguous: there may be more than len() counts
        highest = max(tokenizer.get_vocab().values(), default=0)
        self.token_dtype = np.dtype(np.uint16 if highest < 1 << 16 else np.uint32)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        self._backend = _plain_backend(tokenizer)
        self._scaffold = lru_cache(maxsize=256)(self._take_apart)

    def chunks_of(self, documents: Sequence[Document]) -> Blocks:
        """Tokenise documents and cut them; raises as `encode_batch`."""
        return self._cut(self.encode_batch(documents))

    def encode_batch(self, documents: Sequence[Document]) -> list[Encoded]:
        """Tokenise documents; the order is kept, and a document's result does not depend on its batch.

        Raises:
            CorpusError: The chat template refuses a conversation, or rewrites its answers so that they cannot
                be found again.
        """
        # 1. the text of each document, and the characters of its answers (None: all of it is scored)
        rendered = [self._render(document) for document in documents]
        texts = [text for text, _ in rendered]
        if not texts:
            return []
        # 2. token ids; of texts without their places in characters, which takes a fifth of the time
        batch: Any = None
        if self._backend is not None and all(spans is None for _, spans in rendered):
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = self.tokenizer.split_special_tokens
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
        else:
            batch = self.tokenizer(
                texts,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # no warning for a document longer than the context: chunks are not
            )
            ids = batch["input_ids"]
        # 3. the scored tokens of each, and its BOS
        encoded = []
        for number, (document, (_, spans)) in enumerate(zip(documents, rendered, strict=True)):
            tokens = np.fromiter(ids[number], np.int32, len(ids[number]))
            scored = np.ones(len(tokens), bool)
            if spans is not None:
                tokens, scored = self._score_answers(document, tokens, spans, batch, number)
            if self.bos is not None and not (len(tokens) and tokens[0] == self.bos):
                tokens = np.concatenate([np.array([self.bos], np.int32), tokens])
                scored = np.concatenate([np.zeros(1, bool), scored])
            scored[:1] = False
            encoded.append(Encoded(tokens, scored))
        return encoded

    def chunks(self, encoded: Encoded) -> list[Chunk]:
        """Cut a document into contiguous blocks of block_size tokens, without overlap; the tail is kept."""
        size = self.block_size
        starts = range(0, len(encoded.tokens), size)
        return [_chunk(encoded.tokens[at : at + size], encoded.scored[at : at + size]) for at in starts]

    def _cut(self, batch: Sequence[Encoded]) -> Blocks:
        """Cut all documents of a batch at once; a text costs no Python for each of its chunks."""
        # 1. all chunks have block_size tokens but the last of each document; all but the first token score
        sizes = np.array([len(encoded.tokens) for encoded in batch], np.int64)
        chunks_of = -(-sizes // self.block_size)
        lengths = np.full(int(chunks_of.sum()), self.block_size, np.int64)
        ends = np.cumsum(chunks_of)
        some = sizes > 0
        lengths[ends[some] - 1] = (sizes - (chunks_of - 1) * self.block_size)[some]
        loss_starts = np.ones(len(lengths), np.int32)
        loss_masks = {}
        scored_of = sizes - chunks_of
        # 2. of documents with unscored tokens, chunk by chunk
        for place, encoded in enumerate(batch):
            if encoded.scored[1:].all():
                continue
            pieces = self.chunks(encoded)
            scored_of[place] = sum(piece.n_scored for piece in pieces)
            for number, piece in enumerate(pieces, int(ends[place]) - len(pieces)):
                loss_starts[number] = piece.loss_start
                if piece.loss_mask is not None:
                    loss_masks[number] = piece.loss_mask
        tokens = np.concatenate([np.zeros(0, np.int32), *(encoded.tokens for encoded in batch)])
        return Blocks(tokens.astype(self.token_dtype), lengths, loss_starts, loss_masks, chunks_of, scored_of)

    def _score_answers(
        self, document: Document, tokens: np.ndarray, spans: list[Span], batch: Any, number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and scored of a conversation, up to the end of its last answer."""
        scored = np.zeros(len(tokens), bool)
        end = 0
        for span in spans:
            first, end = self._token_range(batch, number, tokens, span)
            scored[first:end] = True
        if end and (document.messages is None or document.messages[-1]["role"] == "assistant"):
            # the template's text after the last answer is neither scored nor read by scored tokens
            tokens, scored = tokens[:end], scored[:end]
        return tokens, scored

    def _token_range(self, batch: Any, number: int, tokens: np.ndarray, span: Span) -> Span:
        """Return the tokens that hold a character of an answer, and the end-of-turn token behind it."""
        begin, stop = span
        place_of = (batch.char_to_token(number, position) for position in range(begin, stop))
        # some tokenizers give no token to white space
        first = next((place for place in place_of if place is not None), None)
        place_of = (batch.char_to_token(number, position) for position in range(stop - 1, begin - 1, -1))
        last = next((place for place in place_of if place is not None), None)
        if first is None or last is None:
            return 0, 0
        end = last + 1
        # a character of several bytes can be several tokens, all with its place
        while end < len(tokens) and (place := batch.token_to_chars(number, end)) and place.start < stop:
            end += 1
        if end < len(tokens) and int(tokens[end]) in self._special:
            end += 1  # stopping is a part of the answer
        return first, end

    def _render(self, document: Document) -> tuple[str, list[Span] | None]:
        """Return the text to tokenise and the characters of its answers; None when all of it is scored."""
        if document.text is not None:
            return document.text, None
        if document.messages is not None:
            messages = list(document.messages)
        else:
            messages = [
                {"role": "user", "content": document.prompt or ""},
                {"role": "assistant", "content": document.response or ""},
            ]
        if not getattr(self.tokenizer, "chat_template", None):
            return _join([""] + ["\n"] * (len(messages) - 1) + [""], messages)
        text = self._apply_template(messages, document)
        pieces = self._scaffold(tuple(message["role"] for message in messages))
        if pieces is not None:
            # templates write contents as they are, or without white space around them
            for clean in (lambda content: content, str.strip):
                cleaned = [{**message, "content": clean(message["content"])} for message in messages]
                joined, spans = _join(pieces, cleaned)
                if joined == text:
                    return joined, spans
        return text, self._spans_by_prefix(text, messages, document)

    def _take_apart(self, roles: tuple[str, ...]) -> list[str] | None:
        """Return what the template writes around the contents of messages of these roles; None if that
        depends on the contents."""
        marked = [{"role": role, "content": f"{_OPEN}{number}{_CLOSE}"} for number, role in enumerate(roles)]
        try:
            rest = self.tokenizer.apply_chat_template(marked, tokenize=False)
        except Exception:
            return None
        pieces = []
        for message in marked:
            piece, found, rest = rest.partition(message["content"])
            if not found:
                return None
            pieces.append(piece)
        return [*pieces, rest]

    def _spans_by_prefix(self, text: str, messages: list[dict[str, str]], document: Document) -> list[Span]:
        """Find the answers of a template that depends on the contents: what each adds to the text before."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._apply_template(messages[:number], document, add_generation_prompt=True)
            content = message["content"].strip()
            begin = text.find(content, len(before)) if text.startswith(before) else -1
            if begin < 0:
                raise CorpusError(
                    f"{document.source}:{document.line}: the model's chat template rewrites the answers of "
                    f"document '{document.id}', so its answer tokens cannot be told from the others",
                    fix="give prompt and response as one 'text', or use a tokenizer with a plainer template",
                )
            spans.append((begin, begin + len(content)))
        return spans

    def _apply_template(self, messages: list[dict[str, str]], document: Document, **options: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # jinja2 errors, and whatever the template raises itself
            raise CorpusError(
                f"{document.source}:{document.line}: the model's chat template refuses document "
                f"'{document.id}': {error}",
                fix="correct the roles (most templates take user and assistant in turn), or leave it out",
            ) from None


def _plain_backend(tokenizer: Any) -> Any:
    """Return the `tokenizers` object of a tokenizer whose call is a call of that object; else None."""
    if getattr(type(tokenizer), "calls_its_backend", False):  # `OwnTokenizer`
        return tokenizer.backend_tokenizer
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    own = isinstance(tokenizer, Fast) and kind.__call__ is Fast.__call__
    return tokenizer.backend_tokenizer if own and kind._encode_plus is Fast._encode_plus else None


def _join(pieces: Sequence[str], messages: Sequence[dict[str, str]]) -> tuple[str, list[Span]]:
    """Write the contents between the pieces; also the characters of the assistant's."""
    parts, spans, length = [], [], 0
    for piece, message in zip(pieces, messages, strict=False):
        length += len(piece)
        if message["role"] == "assistant" and message["content"]:
            spans.append((length, length + len(message["content"])))
        length += len(message["content"])
        parts += [piece, message["content"]]
    return "".join([*parts, pieces[len(messages)]]), spans


def _chunk(tokens: np.ndarray, scored: np.ndarray) -> Chunk:
    length = len(tokens)
    positions = np.flatnonzero(scored[1:])
    if len(positions) == 0:
        return Chunk(tokens, length, None)
    start = int(positions[0]) + 1
    if len(positions) == length - start:
        return Chunk(tokens, start, None)
    mask = scored.astype(np.uint8)
    mask[0] = 0
    return Chunk(tokens, start, mask)


def scored_positions(chunk: Chunk) -> np.ndarray:
    """Return the positions of a chunk's scored tokens (ω), ascending, each at least 1."""
    if chunk.loss_mask is None:
        return np.arange(chunk.loss_start, len(chunk.tokens))
    return np.flatnonzero(chunk.loss_mask)
