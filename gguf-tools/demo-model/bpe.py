"""The byte-level BPE tokenizer of the models trained here, with GPT-2's pre-tokenizer."""
import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers

EOT = "<|endoftext|>"  # id 0: begins every document, ends every text


def train(texts, vocab):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert tok.get_vocab_size() == vocab and tok.token_to_id(EOT) == 0
    return tok


def of_gguf(path):
    """The tokenizer that a model trained here has in its file."""
    fields = gguf.GGUFReader(path).fields
    tokens, merges = (fields["tokenizer.ggml." + k].contents() for k in ("tokens", "merges"))
    vocab = {t: i for i, t in enumerate(tokens)}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m.split(" ")) for m in merges]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([EOT])
    return tok


def ends_line(tok):
    """For each token whether it ends with a line's end: a window may begin after it."""
    return [s.endswith("\u010a") for s, _ in sorted(tok.get_vocab().items(), key=lambda kv: kv[1])]
