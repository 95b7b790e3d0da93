"""A page on which a model is tried in a browser. This module holds it: one file that loads nothing from elsewhere.

As a chat it keeps the conversation until a new one begins: each question is sent with those before it and their answers.
"""

import base64
import hashlib

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
label { display: inline-block; margin: 0 1rem .5rem 0 }
input, select, textarea, button { font: inherit; padding: .3rem; border: 1px solid #888; border-radius: 4px }
textarea { width: 100%; box-sizing: border-box; min-height: 6rem }
input[type=number] { width: 6rem }
h2 { font-size: 1rem; margin: 1rem 0 .2rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f3f3; padding: 1rem; margin: 0; min-height: 1.5rem }
#state { color: #555 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616 } pre { background: #262626 }
  input, select, textarea, button { color: #ddd; background: #262626 } #state { color: #aaa } }
"""
_SCRIPT = """
const at = name => document.getElementById(name);
let stop = null, conversation = [];  // the messages so far, which go with the next question
const headers = () => ({"Content-Type": "application/json",
  ...(at("key").value ? {"Authorization": "Bearer " + at("key").value} : {})});
async function models() {
  try {
    const found = await fetch("v1/models", {headers: headers()});
    const told = await found.json();
    if (!found.ok) { at("state").textContent = told.error.message; return; }
    at("model").replaceChildren(...told.data.map(model => new Option(model.id)));
    const knows_chat = told.data.some(model => model.chat_template === "own");
    at("kind").value = knows_chat ? "chat" : "completion";
    at("state").textContent = "";
  } catch (error) { at("state").textContent = String(error); }
}
function add(label, text) {
  const head = document.createElement("h2"), body = document.createElement("pre");
  head.textContent = label;
  body.textContent = text;
  at("turns").append(head, body);
  return body;
}
function begin() {
  conversation = [];
  at("turns").replaceChildren();
  at("state").textContent = "";
}
async function ask() {
  const is_chat = at("kind").value === "chat", text = at("prompt").value;
  const messages = [...conversation, {role: "user", content: text}];
  const body = {model: at("model").value, stream: true, stream_options: {include_usage: true},
    max_tokens: Number(at("tokens").value), temperature: Number(at("temperature").value),
    ...(is_chat ? {messages} : {prompt: text})};
  const shown = at("turns").childElementCount;
  if (at("answer")) at("answer").removeAttribute("id");
  add(is_chat ? "Question" : "Prompt", text);
  const answer = add(is_chat ? "Answer" : "Continuation", "");
  answer.id = "answer";
  at("state").textContent = "waiting"; at("ask").disabled = at("new").disabled = true; at("stop").disabled = false;
  stop = new AbortController();
  let is_answered = false;
  try {
    const found = await fetch(is_chat ? "v1/chat/completions" : "v1/completions",
      {method: "POST", headers: headers(), body: JSON.stringify(body), signal: stop.signal});
    if (!found.ok) { at("state").textContent = (await found.json()).error.message; return; }
    const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", state = "done";
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const events = (rest + value).split("\\n\\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.slice(6);
        if (data === "[DONE]") continue;
        const told = JSON.parse(data);
        if (told.error) { state = told.error.message; continue; }
        for (const choice of told.choices) {
          answer.textContent += is_chat ? choice.delta.content || "" : choice.text;
          if (choice.finish_reason) state = choice.finish_reason;
          is_answered ||= Boolean(choice.finish_reason || answer.textContent);
        }
        if (told.usage) state += ", " + told.usage.completion_tokens + " tokens";
      }
    }
    at("state").textContent = state;
  } catch (error) { at("state").textContent = error.name === "AbortError" ? "stopped" : String(error); }
  finally {
    if (!is_answered) while (at("turns").childElementCount > shown) at("turns").lastElementChild.remove();
    else if (is_chat) {
      conversation = [...messages, {role: "assistant", content: answer.textContent}];
      at("prompt").value = "";
    }
    at("ask").disabled = at("new").disabled = false; at("stop").disabled = true;
    at("state").scrollIntoView({block: "nearest"});
  }
}
at("ask").addEventListener("click", ask);
at("stop").addEventListener("click", () => stop && stop.abort());
at("new").addEventListener("click", begin);
at("key").addEventListener("change", models);
models();
"""
HTML = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>zerojax serve</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style></head>
<body>
<h1>zerojax serve</h1>
<p><label>model <select id="model"></select></label>
<label>form <select id="kind"><option value="completion">completion</option><option value="chat">chat</option></select></label>
<label>tokens <input id="tokens" type="number" min="1" value="64"></label>
<label>temperature <input id="temperature" type="number" min="0" step="0.1" value="0"></label>
<label>API key <input id="key" type="password" autocomplete="off"></label></p>
<div id="turns" aria-live="polite"></div>
<h2><label for="prompt">Your question, or a text to continue</label></h2>
<p><textarea id="prompt"></textarea></p>
<p><button id="ask">Ask</button> <button id="stop" disabled>Stop</button> <button id="new">New conversation</button>
<span id="state" role="status"></span></p>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# What the browser may load and run: this style and this script, and requests to the server that sent the page.
POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
