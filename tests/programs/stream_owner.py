"""Own a stream of text, as a run does: `python stream_owner.py TEXT TOKENIZER STATE`.

STATE: "idle", with small units of which the first is tokenized, or "tokenizing", in the middle of a unit. Prints
`started` when it is in that state, and then sleeps until it is killed.
"""

import sys
import threading
import time
from types import SimpleNamespace

from recipe.data import cut
from recipe.data.pack import Encoding, Job
from recipe.data.read import list_units
from recipe.data.source import TextSource
from recipe.data.stream import TextStream
from recipe.data.tokenizer import load_tokenizer

text, tokenizer_dir, state = sys.argv[1:]
if state == "idle":
    cut.SMALL_SOURCE = cut.SMALLEST_UNIT = 1500
source = TextSource((text,))
encoding = Encoding.of(load_tokenizer(tokenizer_dir))
job = Job(source, "", encoding, ("train",), is_temporary=True)
dataset = SimpleNamespace(block_size=32, vocab_size=500)
stream = TextStream(job, list_units(source), "tokenizers", dataset, 1, 0, lambda part: [part])
tokenizing = threading.Thread(target=stream.window, args=(0,))
tokenizing.start()
if state == "idle":
    tokenizing.join()
time.sleep(0.5)
print("started", flush=True)
time.sleep(60)
