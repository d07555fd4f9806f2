// The sample buttons' requests: a long prompt for two workers, an edit that drafts well, JSON with a schema.

const FIELDS = ["sensor", "place", "value", "unit", "time", "error", "battery"]; // fits into 1,024 tokens with its answer
const LONG = FIELDS.map((name) => `class ${name[0].toUpperCase()}${name.slice(1)}Store:
    """The readings' ${name}s, kept in a file of lines."""

    def __init__(self, path):
        self.path = path
        self._${name}s = []

    def add(self, ${name}):
        self._${name}s.append(${name})

    def latest(self):
        return self._${name}s[-1] if self._${name}s else None

    def forget(self, before):
        self._${name}s = [${name} for ${name} in self._${name}s if ${name}.at >= before]


`).join("");
const OPTIONS = ["width", "height", "depth"].map((name) => `    parser.add_argument('--${name}', type=int, default=0,
                        help='the ${name} of the window')
`).join("");
const integer = (minimum, maximum) => ({ type: "integer", minimum, maximum });
const object = (properties) =>
  ({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });
const WORKER = object({ role: { enum: ["prefill", "decode"] }, threads: integer(1, 8) });
const SETTINGS = object({
  host: { enum: ["localhost", "0.0.0.0"] },
  port: integer(1024, 9999),
  log_level: { enum: ["debug", "info", "warning"] },
  workers: { type: "array", items: WORKER, minItems: 2, maxItems: 3 },
  timeout_seconds: integer(1, 600),
});

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
