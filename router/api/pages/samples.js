// The sample buttons' requests: a long prompt for two workers, an edit that drafts well, JSON with a schema.

const LONG = `"""A store of readings, each of a sensor at a time, kept in a file of lines."""

import json
import os
import time


class StoreError(Exception):
    """The file cannot be read, or a line of it is not a reading."""


class Reading:
    """What a sensor told, and when."""

    __slots__ = ("sensor", "value", "at")

    def __init__(self, sensor, value, at=None):
        self.sensor = sensor
        self.value = value
        self.at = time.time() if at is None else at

    def __repr__(self):
        return "Reading(%r, %r, %r)" % (self.sensor, self.value, self.at)

    def __eq__(self, other):
        if not isinstance(other, Reading):
            return NotImplemented
        return self.sensor == other.sensor and self.value == other.value and self.at == other.at

    def to_line(self):
        return json.dumps([self.sensor, self.value, self.at]) + "\\n"

    @classmethod
    def from_line(cls, line):
        try:
            sensor, value, at = json.loads(line)
        except ValueError as error:
            raise StoreError("not a reading: %r" % line) from error
        return cls(sensor, value, at)


class Store:
    """Readings in a file. New ones are appended, and all are read once."""

    def __init__(self, path):
        self.path = path
        self._readings = []
        self._file = None

    def open(self):
        if os.path.exists(self.path):
            with open(self.path) as file:
                self._readings = [Reading.from_line(line) for line in file]
        self._file = open(self.path, "a")
        return self

    def close(self):
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self):
        return self.open()

    def __exit__(self, kind, error, trace):
        self.close()

    def __len__(self):
        return len(self._readings)

    def add(self, sensor, value):
        if self._file is None:
            raise StoreError("the store is closed")
        reading = Reading(sensor, value)
        self._file.write(reading.to_line())
        self._file.flush()
        self._readings.append(reading)
        return reading

    def sensors(self):
        return sorted({reading.sensor for reading in self._readings})

    def of(self, sensor, since=0.0):
        return [each for each in self._readings if each.sensor == sensor and each.at >= since]

    def latest(self, sensor):
        found = self.of(sensor)
        return found[-1] if found else None

    def mean(self, sensor, since=0.0):
        found = self.of(sensor, since)
        if not found:
            return None
        return sum(reading.value for reading in found) / len(found)

    def forget(self, before):
`;
const OPTIONS = ["width", "height", "depth"].map((name) => `    parser.add_argument('--${name}', type=int, default=0,
                        help='the ${name} of the window')
`).join("");
const SETTINGS = {
  type: "object",
  properties: {
    host: { enum: ["localhost", "0.0.0.0"] },
    port: { type: "integer", minimum: 1024, maximum: 9999 },
    log_level: { enum: ["debug", "info", "warning"] },
    workers: {
      type: "array",
      items: {
        type: "object",
        properties: {
          role: { enum: ["prefill", "decode"] },
          threads: { type: "integer", minimum: 1, maximum: 8 },
        },
        required: ["role", "threads"],
        additionalProperties: false,
      },
      minItems: 2,
      maxItems: 3,
    },
    timeout_seconds: { type: "integer", minimum: 1, maximum: 600 },
  },
  required: ["host", "port", "log_level", "workers", "timeout_seconds"],
  additionalProperties: false,
};

/** `about` explains the sample; `fields` returns additional fields of the request. */
export const SAMPLES = {
  long: {
    prompt: LONG,
    max_tokens: 128,
    fields: () => ({ disaggregate: true, cache_salt: String(Math.random()) }), // computed each time
    about: "The request asks to be split: one worker computes the prompt, another decodes. Without that the "
      + "server takes what costs least; the latest placements compare.",
  },
  edit: {
    prompt: `def main():\n    parser = argparse.ArgumentParser()\n${OPTIONS}    parser.add_argument('--color',`,
    max_tokens: 96,
    about: "Given lines are written once more with small changes, as in an edit: most of the text can be drafted.",
  },
  schema: {
    prompt: "# The settings of a server, as JSON:\n",
    max_tokens: 160,
    schema: SETTINGS,
    about: "The answer is JSON of the schema under Parameters, whatever the model would have liked. "
      + "Text about which the schema leaves no choice is drafted, too.",
  },
};
