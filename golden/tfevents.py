"""TensorBoard's event files by TensorBoard's own writer, for the test of Chela's (crates/chela-train/src/metrics/tfevents.rs).

Without an argument it writes tfevents.json: figures, and the bytes of a file that holds them, after reading that file again with
TensorBoard's own loader. With files it reads them with that loader, which checks every sum, and prints what they hold, a step a line.
Needs `pip install tensorboard` (2.21.0) and nothing of TensorFlow."""

import json
import pathlib
import struct
import sys
import tempfile

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

START = 1_780_000_000.125
EVENTS = [
    {"wall_time": START + 10, "step": 1, "scalars": [["train/loss", 0.5], ["train/grad_norm", 1.25]]},
    # Zero is written, and so is what f32 does not hold exactly; a name of other letters; a long one.
    {"wall_time": START + 20.5, "step": 2, "scalars": [["train/clip_fraction", 0.0], ["train/loss", 0.1], ["train/größe", -3e-7]]},
    {"wall_time": START + 31, "step": 300, "scalars": [["train/" + "x" * 150, 1e30]]},
    {"wall_time": START + 40, "step": 5_000_000_000, "scalars": []},
]


def single(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def read(path):
    """What a file holds, as TensorBoard sees it; the first event names the format."""
    events = list(LegacyEventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2", events[0]
    return events[0].wall_time, [
        {"wall_time": e.wall_time, "step": e.step, "scalars": [[v.tag, v.simple_value] for v in e.summary.value]}
        for e in events[1:]
    ]


def main():
    if len(sys.argv) > 1:
        for path in sys.argv[1:]:
            for event in read(path)[1]:
                print(json.dumps(event))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "events.out.tfevents.1"
        with open(path, "wb") as file:
            writer = RecordWriter(file)
            writer.write(Event(wall_time=START, file_version="brain.Event:2").SerializeToString())
            for event in EVENTS:
                values = [Summary.Value(tag=tag, simple_value=x) for tag, x in event["scalars"]]
                made = Event(wall_time=event["wall_time"], step=event["step"], summary=Summary(value=values))
                writer.write(made.SerializeToString())
            writer.flush()
        data = path.read_bytes()
        rounded = [{**e, "scalars": [[tag, single(x)] for tag, x in e["scalars"]]} for e in EVENTS]
        assert read(path) == (START, rounded)
    out = pathlib.Path(__file__).with_name("tfevents.json")
    golden = {"wall_time": START, "events": EVENTS, "file": data.hex()}
    out.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


main()
