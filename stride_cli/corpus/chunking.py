"""Documents to tokens to chunks: which tokens a chunk holds, and which of them are scored (ω)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stride_cli import output
from stride_cli.corpus.documents import Document
from stride_cli.corpus.forms import Form, Span, is_scored, render, render_prompt, shared_prefix
from stride_cli.errors import CorpusError


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
        tokenizer: Of transformers. Special tokens written out in a text are read as such, as in training.
        block_size: Most tokens of a chunk, at least 2: its first is not scored.
        form: How prompt and response, or messages, become one text; default: `Form.choose`.
        skip: Keep a document that the template refuses, without scored tokens, and tell of it.
        vocabulary: Tokens that the model has; None: all of the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        block_size: int,
        form: Form | None = None,
        skip: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.form = form or Form.choose(tokenizer)
        self.skip, self.vocabulary = skip, vocabulary
        self.bos: int | None = tokenizer.bos_token_id if self.form.bos else None
        self._backend = _plain_backend(tokenizer)

    @cached_property
    def token_dtype(self) -> np.dtype[Any]:
        """The type of tokens on disk; ids need not be contiguous: there may be more than len() counts."""
        highest = max(self.tokenizer.get_vocab().values(), default=0)
        return np.dtype(np.uint16 if highest < 1 << 16 else np.uint32)

    def chunks_of(self, documents: Sequence[Document]) -> Blocks:
        """Tokenise documents and cut them; raises as `encode_batch`."""
        return self._cut(self.encode_batch(documents))

    def encode_batch(self, documents: Sequence[Document], *, ends: bool = True) -> list[Encoded]:
        """Tokenise documents; the order is kept, and a document's result does not depend on its batch.

        Args:
            ends: See `render`.

        Raises:
            CorpusError: The chat template refuses a conversation, or rewrites its answers so that they cannot
                be found again; a token was added to the tokenizer, and the model has none such.
        """
        # 1. the text of each document, and the characters of its answers (None: all of it is scored)
        rendered = [self._render(document, ends) for document in documents]
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
            batch = self._tokenised(texts)
            ids = batch["input_ids"]
        # 3. the scored tokens of each, and its BOS; a trainer's tokens stay as they are
        encoded = []
        for number, (document, (text, spans)) in enumerate(zip(documents, rendered, strict=True)):
            listed, ranges = document.tokens or (ids[number], spans)
            tokens = np.fromiter(listed, np.int32, len(listed))
            scored = np.full(len(tokens), ranges is None)
            if document.tokens is None and spans is not None:
                ranges = [self._token_range(batch, number, tokens, text, span) for span in spans]
            for first, end in ranges or ():
                scored[first:end] = True
            if document.tokens is None:
                last = max((end for _, end in ranges or ()), default=0)
                if last and (document.messages is None or is_scored(document.messages[-1])):
                    # the template's text after the last answer is neither scored nor read by scored tokens
                    tokens, scored = tokens[:last], scored[:last]
                if self.bos is not None and not (len(tokens) and tokens[0] == self.bos):
                    tokens = np.concatenate([np.array([self.bos], np.int32), tokens])
                    scored = np.concatenate([np.zeros(1, bool), scored])
            scored[:1] = False
            if self.vocabulary is not None and len(tokens) and tokens.max() >= self.vocabulary:
                where = f"{document.source}:{document.line}: document '{document.id}'"
                token = repr(self.tokenizer.decode([int(tokens.max())]))
                fix = "take it out of the text: the tokenizer got it after the model was trained"
                raise CorpusError(f"{where} has the token {token}, for which the model has no row", fix=fix)
            encoded.append(Encoded(tokens, scored))
        return encoded

    def prompt_tokens(self, document: Document) -> list[int]:
        """Return the tokens after which the model is to answer a prompt, or the last of some messages."""
        (ids,) = self._tokenised([render_prompt(document, self.form, self.tokenizer)])["input_ids"]
        return list(ids) if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def _render(self, document: Document, ends: bool) -> tuple[str, list[Span] | None]:
        if document.tokens is not None:
            return "", None
        try:
            return render(document, self.form, self.tokenizer, ends)
        except CorpusError as error:
            if not self.skip:
                raise
            output.note(f"kept without a scored token: {error.message}")
            return document.plain_text, []

    def _tokenised(self, texts: list[str]) -> Any:
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning for a document longer than the context: chunks are not
        )

    def chunks(self, encoded: Encoded) -> list[Chunk]:
        """Cut a document into contiguous blocks of block_size tokens, without overlap; the tail is kept."""
        cut = self._cut([encoded])
        places = range(0, len(encoded.tokens), self.block_size)
        return [
            Chunk(encoded.tokens[at : at + self.block_size], int(start), cut.loss_masks.get(number))
            for number, (at, start) in enumerate(zip(places, cut.loss_starts, strict=True))
        ]

    def _cut(self, batch: Sequence[Encoded]) -> Blocks:
        """Cut all documents of a batch at once; a text costs no Python for each of its chunks."""
        # 1. all chunks have block_size tokens but the last of each document
        sizes = np.array([len(encoded.tokens) for encoded in batch], np.int64)
        chunks_of = -(-sizes // self.block_size)
        ends = np.cumsum(chunks_of)
        lengths = np.full(int(chunks_of.sum()), self.block_size, np.int64)
        some = sizes > 0
        # the last has what is left; an empty document has no chunk
        lengths[ends[some] - 1] = (sizes - (chunks_of - 1) * self.block_size)[some]
        # 2. a chunk's first token has nothing before it; masks only where the scored tokens are no suffix
        tokens = np.concatenate([np.zeros(0, np.int32), *(encoded.tokens for encoded in batch)])
        scored = np.concatenate([np.zeros(0, bool), *(encoded.scored for encoded in batch)])
        begins = np.cumsum(lengths) - lengths
        scored[begins] = False
        # scored tokens of a chunk are a difference of running counts
        before = np.concatenate([[0], np.cumsum(scored)])
        counts = before[begins + lengths] - before[begins]
        # of a chunk without any, its length stands for the first
        positions = np.append(np.flatnonzero(scored), len(scored))
        firsts = np.where(counts > 0, positions[before[begins]] - begins, lengths)
        masked = np.flatnonzero((counts > 0) & (counts < lengths - firsts))
        masks = {int(n): scored[begins[n] : begins[n] + lengths[n]].astype(np.uint8) for n in masked}
        of_documents = np.concatenate([[0], np.cumsum(counts)])
        scored_of = of_documents[ends] - of_documents[ends - chunks_of]
        ids, starts = tokens.astype(self.token_dtype), firsts.astype(np.int32)
        return Blocks(ids, lengths, starts, masks, chunks_of, scored_of)

    def _token_range(self, batch: Any, number: int, tokens: np.ndarray, text: str, span: Span) -> Span:
        """Return the tokens that hold a character of an answer; one that a prompt's end is in, too."""
        begin, stop = span
        if not hasattr(batch, "char_to_token") or not getattr(batch, "is_fast", True):
            # a tokenizer that tells no places: the tokens before an answer are those of the text before it
            parts = self._tokenised([text[:begin], text[:stop]])["input_ids"]
            start, stopped = (shared_prefix(part, tokens) for part in parts)
            return start, len(tokens) if stop == len(text) else stopped
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
        return first, end


def _plain_backend(tokenizer: Any) -> Any:
    """Return the `tokenizers` object of a tokenizer whose call is a call of that object; else None."""
    if getattr(type(tokenizer), "calls_its_backend", False):  # `OwnTokenizer`
        return tokenizer.backend_tokenizer
    from transformers import PreTrainedTokenizerFast as Fast

    # a subclass that overrides the call adds something to it
    kind = type(tokenizer)
    own = isinstance(tokenizer, Fast) and kind.__call__ is Fast.__call__
    return tokenizer.backend_tokenizer if own and kind._encode_plus is Fast._encode_plus else None


def scored_positions(chunk: Chunk) -> np.ndarray:
    """Return the positions of a chunk's scored tokens (ω), ascending, each at least 1."""
    if chunk.loss_mask is None:
        return np.arange(chunk.loss_start, len(chunk.tokens))
    return np.flatnonzero(chunk.loss_mask)
