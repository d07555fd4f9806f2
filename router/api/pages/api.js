// Sends requests to this server with this tab's API key, and turns its errors into words.

const KEY = "tandem.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

/** An error answer; `status` is 0 if no answer came. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Send a GET, or with a `body` a POST. Throws `ApiError`, and an abort of `signal` unchanged. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    const method = body ? "POST" : "GET";
    response = await fetch(`.${path}`, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function get(path) {
  const response = await request(path, { signal: AbortSignal.timeout(5000) });
  return response.json().catch(() => { throw new ApiError("The server's answer broke off."); });
}

async function refusal(response) {
  const status = response.status;
  if (status === 401) {
    return new ApiError(key.get() ? "The server refused the API key." : "The server asks for an API key.", status);
  }
  const wait = response.headers.get("retry-after");
  const again = wait ? ` Try again in ${wait} s.` : "";
  const said = await response.json().then((body) => body.error.message, () => response.statusText);
  return new ApiError(`${said} (${status})${again}`, status);
}

/** Yield a stream's events as they come. Throws `ApiError` for an error event, or if the stream ends too early. */
export async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  let complete = false;
  for await (const bytes of chunks(response)) {
    const parts = (rest + decoder.decode(bytes, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") {
        complete = true;
        continue;
      }
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 200);
      yield event;
    }
  }
  if (!complete) throw new ApiError("The stream ended before the answer was complete.");
}

async function* chunks(response) {
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
