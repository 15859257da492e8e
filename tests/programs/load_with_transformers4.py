"""Load exported models with the Transformers that this Python finds, and print as JSON what it makes of a text.

python load_with_transformers4.py TEXT FOLDER...
"""

import json
import sys

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

text, folders = sys.argv[1], sys.argv[2:]
found = {}
for folder in folders:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=32)
    found[folder] = {
        "ids": batch["input_ids"][0].tolist(),
        "special": tokenizer.all_special_tokens,
        "loss": model(**batch, labels=batch["input_ids"]).loss.item(),  # GPT-2 would add token types
        "class": type(tokenizer).__name__,
    }
    pipeline("text-generation", model=folder)("the cat")
print(json.dumps({"version": transformers.__version__, "found": found}))
