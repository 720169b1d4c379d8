"""Small tokenizers of the kinds that models have: with and without a space in front of a text, with and without BOS."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<pad>", "<s>", "</s>", "[INST]", "[/INST]"]
CORPUS = [
    "the user asks the assistant and the assistant answers the user",
    "User: hello there\nAssistant: hello user, how are you today?\n\n",
    "what is the capital of France? Paris. 0 1 2 3 4 5 6 7 8 9 = + is 4 so 5",
] * 20
TEMPLATE = (  # Llama 2 and Mistral: no turn has a line of its own
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
METASPACE = {"first": ("first", True), "always": ("always", True), "unsplit": ("always", False)}
KINDS = (
    *(f"{model} {how}" for model in ("unigram", "bpe") for how in METASPACE),
    "legacy",
    "bytes",
    "bytes with a space",
)


@cache
def tokenizer_of(kind: str, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one of KINDS."""
    if kind.startswith("bytes"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind != "bytes")
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        scheme, splits = METASPACE.get(kind.partition(" ")[2], ("always", True))
        tokenizer = Tokenizer(models.Unigram() if kind.startswith("unigram") else models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=splits)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        alphabet = ["\n"]
    shared = {"special_tokens": SPECIAL, "show_progress": False, "initial_alphabet": alphabet}
    if kind.startswith("unigram"):
        trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", **shared)
    else:
        trainer = trainers.BpeTrainer(vocab_size=400, **shared)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind == "legacy":  # the normaliser puts the space in front of each part between special tokens
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if adds_bos:
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names)
