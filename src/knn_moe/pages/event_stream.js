// Answers of a server, whole or as streams, and its errors as one sentence.
const server = (() => {
  const KEY = "knn-moe-api-key"; // in this tab only

  class Refusal extends Error {
    constructor(message, status) {
      super(message);
      this.status = status;
    }
  }

  function headers() {
    const key = sessionStorage.getItem(KEY);
    return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  }

  async function send(path, body, signal) {
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers: headers(), body: body && JSON.stringify(body), signal });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Refusal("The server does not answer. Is it still running?", 0);
    }
    if (response.ok) return response;
    let said = null;
    try {
      said = (await response.json()).error.message;
    } catch {
      said = null; // no answer of this server: a proxy's, perhaps
    }
    throw new Refusal(said ?? `The server answered with status ${response.status}.`, response.status);
  }

  async function ask(path, body, signal) {
    const response = await send(path, body, signal);
    try {
      return await response.json();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Refusal("The server's answer broke off.", 0);
    }
  }

  // Calls onChunk with each chunk of a stream. What fails inside of it is thrown.
  async function stream(path, body, signal, onChunk) {
    const response = await send(path, { ...body, stream: true }, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    let done = false;
    while (!done) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        throw error.name === "AbortError" ? error : new Refusal("The server's answer broke off.", 0);
      }
      if (part.done) break;
      const events = (held + part.value).split("\n\n");
      held = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") {
          done = true;
          continue;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refusal(chunk.error.message, 0);
        onChunk(chunk);
      }
    }
    if (!done) throw new Refusal("The server's answer broke off.", 0);
  }

  const keep = (key) => sessionStorage.setItem(KEY, key);
  const forget = () => sessionStorage.removeItem(KEY);
  const hasKey = () => sessionStorage.getItem(KEY) !== null;
  return { ask, stream, keep, forget, hasKey };
})();
