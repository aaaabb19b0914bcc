// The page of `stride serve`. No library, nothing fetched from elsewhere; text reaches the page as text alone.
"use strict";

const $ = id => document.getElementById(id);
const answers = []; // of one or two panes: {question, record, tokens, chosen: Set of words, words, node}
const DECIDED = 0.1; // as `stride_cli.schema.answer_records.DECIDED`
const looks = LOOKS; // of verdicts: what the terminal and reports go by, which the server puts here
let served = [];
let following = false; // the address is being followed: it is not written meanwhile

/* ---- asking ---- */

class Refused extends Error {
  constructor(told) { super(told.message); this.fix = told.fix; }
}

async function request(path, body, options = {}) {
  // who may ask is known by a cookie, which a one-time link has set
  const headers = body ? { "Content-Type": "application/json" } : {};
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, credentials: "same-origin",
      body: body ? JSON.stringify(body) : undefined, ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused({ message: "the server does not answer", fix: "start it again: stride serve" });
  }
  if (!answer.ok) {
    let told = { message: `the server says ${answer.status}`, fix: null };
    try { told = await answer.json(); } catch { /* no JSON */ }
    throw new Refused(told);
  }
  return answer;
}

const ask = async (path, body) => (await request(path, body)).json();

/* ---- making nodes ---- */

function make(name, about = {}, ...inside) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(about)) {
    if (value === null || value === undefined) continue;
    if (key === "onclick") node.addEventListener("click", value);
    else if (key === "width") node.style.width = value; // through the CSSOM, which the policy allows
    else if (key in node && key !== "list") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...inside.filter(each => each !== null && each !== undefined));
  return node;
}

// as `stride_cli.attribution.frames.share_text` and `influence_text`
const percent = share => (share >= 0.005 ? `${Math.round(100 * share)}%` : "<1%");
const small = (value, places) => value.toExponential(places).replace(/e-(\d)$/u, "e-0$1");
const digits = value => (Math.abs(value) >= 1e-4 ? value.toPrecision(3) : small(value, 2));
const numbered = value => (Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en") : digits(value));
const signed = value => `${value > 0 ? "+" : ""}${value ? numbered(value) : "0"}`;
const end = value => (value < 0 ? "" : "+") + (Math.abs(value) >= 1e-4 || !value ? Number(value.toPrecision(2))
  : small(value, 1).replace(".0e", "e"));
const influence = (value, unit, { low, high } = {}) => signed(value) + (unit === "nats" ? " nats" : "")
  + (high === undefined ? "" : ` (${end(low)} … ${end(high)})`);

function say(text) { $("status").textContent = text; }

function tellError(error, place = $("error")) {
  place.hidden = false;
  place.textContent = error.fix ? `${error.message}\nfix: ${error.fix}` : String(error.message || error);
}

/* ---- the form, and the address ---- */

function fromForm() {
  const question = { prompt: $("prompt").value, index: $("index").value, top: Number($("top").value) || 10,
    bottom: Number($("bottom").value) || 0 };
  if ($("response").value.trim()) question.response = $("response").value;
  if ($("chat").checked && !$("chat-field").hidden) question.chat = true;
  return question;
}

function toForm(question) {
  $("prompt").value = question.prompt;
  $("response").value = question.response || "";
  if (question.index) $("index").value = question.index;
  $("top").value = question.top;
  $("bottom").value = question.bottom;
  $("chat").checked = Boolean(question.chat);
  offerChat();
}

function offerChat() {
  const index = served.find(each => each.name === $("index").value);
  $("chat-field").hidden = !(index && index.chat);
}

function address() {
  const found = new URLSearchParams();
  answers.forEach((answer, at) => {
    const before = at ? "2." : "";
    for (const [key, value] of Object.entries(answer.question)) found.set(before + key, String(value));
    if (answer.chosen.size) found.set(`${before}words`, [...answer.chosen].sort((a, b) => a - b).join("."));
  });
  return `#${found}`;
}

function writeAddress(asked = false) {
  // a question asked is a step of the browser's history; words chosen are none
  if (following) return;
  history[asked ? "pushState" : "replaceState"](null, "", `${location.pathname}${address()}`);
}

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  const questions = [];
  for (const before of ["", "2."]) {
    const prompt = found.get(`${before}prompt`);
    if (!prompt) continue;
    const question = { prompt, top: Number(found.get(`${before}top`)) || 10,
      bottom: Number(found.get(`${before}bottom`)) || 0 };
    for (const key of ["index", "response"]) {
      if (found.get(before + key)) question[key] = found.get(before + key);
    }
    if (found.get(`${before}chat`) === "true") question.chat = true;
    const words = (found.get(`${before}words`) || "").split(".").filter(Boolean).map(Number);
    questions.push([question, words]);
  }
  return questions;
}

/* ---- an answer ---- */

async function put(question, at, words = []) {
  $("error").hidden = true;
  const answer = { question, record: null, tokens: null, words: [], chosen: new Set(words), node: null };
  say("Asking the model …");
  $("answers").setAttribute("aria-busy", "true");
  $("go").disabled = $("beside").disabled = true;
  $("empty").hidden = true;
  const begun = performance.now();
  try {
    answer.record = await ask("query", { ...question, explain: true, passages: "like" });
  } catch (error) {
    say("");
    $("answers").setAttribute("aria-busy", "false");
    tellError(error);
    return;
  } finally {
    $("go").disabled = $("beside").disabled = false;
  }
  $("beside").hidden = false;
  answers.length = Math.min(answers.length, at);
  answers[at] = answer;
  say(`Answered in ${((performance.now() - begun) / 1000).toFixed(2)} s.`);
  writeAddress(true);
  remember(answer);
  draw();
  await Promise.all([carry(answer), divide(answer)]);
  $("answers").setAttribute("aria-busy", "false");
  if (answer.estimated) ask(`verify?index=${encodeURIComponent(answer.record && question.index)}`).then(answer.estimated, () => {});
}

async function carry(answer) {
  // the answer came with the sentences most like the query; those that carry the influence take their place
  try {
    const found = await ask("passages", answer.question);
    const passages = new Map(found.passages.map(each => [each.chunk, each.passage]));
    for (const hit of [...answer.record.hits, ...answer.record.opposers]) {
      hit.passage = passages.get(hit.chunk) ?? hit.passage;
    }
    answer.carried = true;
    drawHits(answer);
  } catch (error) {
    tellError(error, answer.told);
  }
}

async function divide(answer) {
  const index = served.find(each => each.name === answer.question.index) || served[0];
  if (index && !index.by_token) {
    answer.undivided = "These operators do not tell the influence on single words.";
  } else {
    try {
      answer.tokens = await ask("tokens", answer.question);
      answer.words = wordsOf(answer.tokens.pieces);
      answer.chosen = new Set([...answer.chosen].filter(at => at < answer.words.length));
    } catch (error) {
      answer.undivided = error.message;
    }
  }
  drawSaid(answer);
  drawHits(answer);
}

function wordsOf(pieces) {
  // tokens of one word are chosen together, and what is nothing but space with what comes after it
  const words = [];
  for (const piece of pieces) {
    const last = words[words.length - 1];
    const goesOn = last && (!last.text.trim()
      || (/[\p{L}\p{N}]$/u.test(last.text) && /^[\p{L}\p{N}]/u.test(piece.text)));
    if (goesOn && (last.rows.length > 0) === (piece.row !== null)) {
      last.text += piece.text;
      if (piece.row !== null) last.rows.push(piece.row);
    } else {
      words.push({ text: piece.text, rows: piece.row === null ? [] : [piece.row] });
    }
  }
  return words;
}

function draw() {
  $("layout").className = answers.length > 1 ? "compared" : "";
  $("answers").replaceChildren(...answers.map(drawAnswer));
  answers.forEach(answer => { drawSaid(answer); drawHits(answer); });
}

function drawAnswer(answer, at) {
  const record = answer.record;
  const [first, ...others] = (record.explanation || "").split(/(?<=\.) /u);
  const [, word, rest] = first.match(/^(\w+): (.*)$/u) || [null, "", first];
  const { named } = looks[record.verdict] || looks[""];
  const title = answers.length > 1 ? `Answer ${at + 1}` : "The answer";
  answer.said = make("p", { className: "said" });
  answer.hint = make("p", { className: "faint" });
  answer.hits = make("div");
  answer.told = make("div", { className: "error", hidden: true, role: "alert" });
  const actions = make("div", { className: "buttons" },
    make("button", { type: "button", onclick: () => copyLink() }, "Copy link"),
    ...["html", "csv", "json"].map(form => make("button", { type: "button",
      onclick: () => save(answer, form) }, `Save as ${form.toUpperCase()}`)));
  const untrained = others.filter(said => said.startsWith("By its own record"));
  answer.node = make("section", { className: "answer", "aria-label": title },
    make("h2", { className: answers.length > 1 ? "" : "unseen" }, title),
    answer.said, answer.hint,
    make("p", { className: `judged ${record.verdict || ""}` },
      word ? make("span", { className: "verdict" }, `${word}: `) : null, rest),
    ...untrained.map(said => make("p", { className: "flag" }, said)),
    named ? drawVerification(answer) : null, answer.hits, answer.told,
    drawMeasured(record, others.filter(said => !untrained.includes(said)).join(" "),
      named ? null : drawVerification(answer)), actions);
  return answer.node;
}

function drawMeasured(record, trust, more) {
  const tokens = record.scored_tokens;
  const rows = [["response", `${record.generated ? "the model’s own continuation" : "a given response"}, ${tokens} `
    + `scored token${tokens === 1 ? "" : "s"}, loss ${record.loss.toFixed(3)} nats a token`
    + (record.cut ? "; cut: STRIDE_QUERY_MAX_NEW_TOKENS=40 lets the model write more" : "")],
  ["influences", record.unit === "nats"
    ? `forecasts in nats a token${record.scale.band ? ", in brackets nine in ten retrainings" : ""}`
    : "relative, without a unit: compare them within one answer"],
  ["measured", `${record.measurement.subsets.toLocaleString("en")} subsets, ${record.measurement.method}`],
  ["chunks read", record.read], ["R²", record.recovery.r_squared], ["relative gap", record.recovery.relative_gap]];
  return make("details", {}, make("summary", {}, "How far to trust this, and how it was measured"),
    trust ? make("p", {}, trust) : null, more,
    make("dl", {}, ...rows.filter(([, value]) => value !== null && value !== undefined).flatMap(([name, value]) => [
      make("dt", {}, name), make("dd", {}, String(typeof value === "number" ? Number(value.toPrecision(4)) : value))])));
}

/* ---- questions asked before, in this tab alone ---- */

const KEPT = "asked";
const shortened = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
const remembered = () => JSON.parse(sessionStorage.getItem(KEPT) || "[]");

function remember(answer) {
  const { prompt, response, verdict } = answer.record;
  const asked = { address: address(), prompt, response, verdict };
  const others = remembered().filter(each => each.prompt !== prompt || each.response !== response);
  sessionStorage.setItem(KEPT, JSON.stringify([asked, ...others].slice(0, 20)));
  drawHistory();
}

function drawHistory() {
  const asked = remembered();
  $("history").hidden = !asked.length;
  $("asked").replaceChildren(...asked.map(each => make("li", {},
    make("a", { href: each.address }, each.prompt, make("b", {}, shortened(each.response, 40))),
    each.verdict ? make("span", { className: `verdict ${each.verdict}` }, each.verdict) : null)));
}

/* ---- words of the response ---- */

function drawSaid(answer) {
  const record = answer.record;
  if (!answer.tokens) {
    answer.said.replaceChildren(record.prompt, make("b", {}, record.response), record.cut ? "…" : "");
    answer.hint.textContent = answer.undivided || "Looking at single words …";
    return;
  }
  const group = make("span", { role: "group", "aria-label": "Words of the response: choose some" });
  const sources = sourcesOf(answer);
  const buttons = answer.words.flatMap((word, at) => {
    if (!word.rows.length) return make("b", {}, word.text);
    const [lead, text] = word.text.match(/^(\s*)(.*)$/su).slice(1);
    const source = sources[at], last = source && source !== sources[at + 1];
    return [text ? lead : "", make("button", { type: "button", className: "token", tabIndex: -1, "aria-pressed": "false",
      "aria-label": text ? null : "space", "data-at": String(at), title: source && titleOf(source),
      "data-source": source && "", "data-cite": last ? String(source.rank) : null }, text || lead)];
  });
  group.append(...buttons);
  const pressable = [...group.querySelectorAll(".token")];
  if (pressable.length) pressable[0].tabIndex = 0;
  let dragging = null; // whether what is passed over is chosen, or let go
  const set = (button, wanted) => {
    const at = Number(button.dataset.at);
    if (wanted) answer.chosen.add(at); else answer.chosen.delete(at);
    choose();
  };
  const choose = () => {
    for (const each of pressable) {
      each.setAttribute("aria-pressed", String(answer.chosen.has(Number(each.dataset.at))));
    }
    answer.hint.replaceChildren(answer.chosen.size
      ? make("button", { type: "button", className: "plain",
        onclick: () => { answer.chosen.clear(); choose(); } }, "Back to the whole response")
      : `${sources.some(Boolean) ? "Marked words have a source, numbered as below. " : ""}Choose words (click, drag, or `
        + "arrow keys and Space) to see their own documents.");
    drawHits(answer);
    writeAddress();
  };
  group.addEventListener("pointerdown", event => {
    const button = event.target.closest(".token");
    if (!button || event.button) return;
    dragging = button.getAttribute("aria-pressed") !== "true";
    set(button, dragging);
    button.focus();
    event.preventDefault();
  });
  group.addEventListener("pointerover", event => {
    const button = event.target.closest(".token");
    if (button && dragging !== null && event.buttons) set(button, dragging);
  });
  addEventListener("pointerup", () => { dragging = null; });
  group.addEventListener("click", event => { // of a keyboard or of a screen reader: no pointer went down
    const button = event.target.closest(".token");
    if (button && event.detail === 0) set(button, button.getAttribute("aria-pressed") !== "true");
  });
  group.addEventListener("keydown", event => {
    const place = pressable.indexOf(event.target);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") { answer.chosen.clear(); choose(); return; }
    if (place < 0 || !step) return;
    event.preventDefault();
    const next = pressable[Math.max(0, Math.min(pressable.length - 1, place + step))];
    pressable.forEach(each => { each.tabIndex = each === next ? 0 : -1; });
    if (event.shiftKey) { set(event.target, true); set(next, true); }
    next.focus();
  });
  answer.said.replaceChildren(record.prompt, group, record.cut ? "…" : "");
  choose();
}

function sourcesOf(answer) {
  // of each word that the prompt decides, the named document that moved it most, where no other moved it more
  const { record, tokens } = answer;
  const named = (looks[record.verdict] || looks[""]).named && record.verdict !== null;
  const above = new Map(record.hits.filter(hit => named && hit.above_line).map(hit => [hit.document, hit]));
  return answer.words.map(word => {
    const rows = word.rows.filter(row => (record.tokens || [])[row] >= DECIDED);
    if (!rows.length || !above.size || !/[\p{L}\p{N}]/u.test(word.text)) return null;
    const sums = tokens.documents.map((_, column) => rows.reduce((sum, row) => sum + tokens.influence[row][column], 0));
    return above.get(tokens.documents[sums.indexOf(Math.max(...sums))]) || null;
  });
}

/* ---- documents ---- */

const titleOf = hit => hit.title || hit.document;

function chosenHits(answer) {
  // a document's influence on some words is the sum of these words' rows
  const rows = [...answer.chosen].flatMap(at => answer.words[at].rows);
  const line = new Map([...answer.record.hits, ...answer.record.opposers].map(hit => [hit.document, hit.above_line]));
  const judged = answer.record.judged && answer.record.judged.line !== null; // what is no hit is below
  const found = answer.tokens.documents.map((document, column) => {
    const influence = rows.reduce((sum, row) => sum + answer.tokens.influence[row][column], 0);
    const [passage, trained, title] = ["passages", "trained", "titles"].map(name => answer.tokens[name][column]);
    const above_line = judged ? line.get(document) || false : null;
    return { document, title, influence, passage, trained, above_line, sign: influence >= 0 ? "supports" : "opposes" };
  });
  const all = found.reduce((sum, hit) => sum + Math.abs(hit.influence), 0) || 1;
  found.forEach(hit => { hit.share = Math.abs(hit.influence) / all; });
  const order = sign => found.filter(hit => hit.sign === sign)
    .sort((a, b) => Math.abs(b.influence) - Math.abs(a.influence));
  const ranked = (hits, count) => hits.slice(0, count).map((hit, at) => ({ ...hit, rank: at + 1 }));
  return [ranked(order("supports"), answer.question.top), ranked(order("opposes"), answer.question.bottom)];
}

function sections(look, supporters, opposers) {
  // as `stride_cli.schema.answer_records.sections`
  const quiet = hit => !look.named || hit.above_line === false;
  const parts = [[look.heading, look.closest, supporters], [look.opposing, look.hardly, opposers]];
  return parts.flatMap(([loud, low, hits]) => [[loud, hits.filter(hit => !quiet(hit)), false], [low, hits.filter(quiet), true]])
    .filter(([heading, hits]) => hits.length || (heading === look.heading && heading !== looks[""].heading));
}

function drawHits(answer) {
  const chosen = answer.tokens && answer.chosen.size > 0;
  const record = answer.record;
  const [supporters, opposers] = chosen ? chosenHits(answer) : [record.hits, record.opposers];
  const words = chosen && [...answer.chosen].sort((a, b) => a - b).map(at => answer.words[at].text).join("").trim();
  const about = chosen ? `“${words}”` : "this";
  const parts = [];
  if (chosen) {
    parts.push(make("p", { className: "faint" }, "Influences on words are read from the documents’ own "
      + `gradients (${answer.tokens.chunks} chunks). Near-duplicates share no credit and nothing is shrunk, so that `
      + "those of all words need not add up to the influence on the whole."));
  }
  const judged = looks[record.verdict] || looks[""]; // a verdict is on the whole response
  const look = chosen && judged.named
    ? { ...looks[""], closest: "others, not above the line of the whole response" } : judged;
  for (const [heading, hits, quiet] of sections(look, supporters, opposers)) {
    const title = heading[0].toUpperCase() + heading.slice(1).replace(/this$/u, about);
    const list = make("ol", {}, ...hits.map(hit => drawHit(answer, hit, quiet)));
    parts.push(...(quiet ? [make("details", { className: "quiet" },
      make("summary", {}, `${title} (${hits.length})`), list)] : [make("h3", {}, title), list]));
  }
  if (!chosen && supporters.length && supporters.length < record.asked) {
    parts.push(make("p", { className: "faint" },
      `${supporters.length} of ${record.asked} asked: no other document supports this.`));
  }
  if (parts.length === 0) parts.push(make("p", {}, "No document has any weight."));
  answer.hits.replaceChildren(...parts);
}

function drawHit(answer, hit, quiet) {
  // without numbers and bar where it is `quiet`
  const other = answers.find(each => each !== answer);
  const shared = other && [...other.record.hits, ...other.record.opposers].find(each => each.document === hit.document);
  const flags = [];
  const ofWords = hit.chunk === undefined; // which has no other passage, and a unit and shares of its own
  const final = answer.carried || ofWords;
  const unit = ofWords ? answer.tokens.unit : answer.record.unit;
  const shareOf = ofWords ? "the influence of all documents that were read on these words" : "all influence on the response";
  if (hit.trained === false) flags.push("the model was never trained on it");
  if (hit.backfilled) flags.push("by correlation only");
  if (hit.read === false && !hit.backfilled) flags.push("estimated, not read");
  if (hit.seen === false) flags.push("never seen by the operators");
  if (hit.neighbours) flags.push(`${hit.neighbours} indistinguishable chunk${hit.neighbours > 1 ? "s" : ""}`);
  const [folder, name] = hit.title ? ["", hit.title] : hit.document.match(/^(.*\/)?(.*)$/u).slice(1);
  const measured = hit.influence && !quiet;
  return make("li", { className: "hit" },
    make("div", { className: "top" },
      make("span", { className: "rank" }, String(hit.rank)),
      make("button", { type: "button", className: "plain", onclick: event => read(answer, hit, event.target) },
        folder ? make("span", { className: "faint" }, folder) : null, name),
      hit.title ? make("span", { className: "id" }, hit.document) : null,
      measured ? make("span", { className: "share", title: `share of ${shareOf}` },
        make("span", { className: "meter" }, make("span", { className: `bar ${hit.sign}`,
          width: `${(100 * hit.share).toFixed(1)}%` })), percent(hit.share)) : null),
    hit.passage ? make("p", { className: final ? "passage" : "passage faint" },
      ...(!quiet ? withWords(hit.passage, answer.record) : [hit.passage])) : null,
    measured || flags.length || shared ? make("div", { className: "top faint" },
      measured ? make("span", {}, `influence ${influence(hit.influence, unit, hit)}`) : null,
      flags.length ? make("span", { className: quiet ? "" : "flag" }, flags.join("; ")) : null,
      shared ? make("span", {}, `also in the other answer: ${shared.sign} it, rank ${shared.rank}`) : null) : null);
}

function withWords(passage, record) {
  // as `stride_cli.report.contents.matching_spans`
  const words = `${record.prompt} ${record.response}`.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
  const wanted = new Set(words.filter(word => word.length > 3 || /^\p{N}+$/u.test(word)));
  return passage.split(/([\p{L}\p{N}_]+)/u)
    .map(part => (wanted.has(part.toLowerCase()) ? make("mark", {}, part) : part));
}

/* ---- one document, whole ---- */

async function read(answer, hit, opener) {
  const dialog = $("reader");
  $("reader-title").textContent = titleOf(hit);
  $("reader-body").replaceChildren(make("p", { role: "status" }, "Reading …"));
  dialog.showModal();
  dialog.addEventListener("close", () => opener.focus(), { once: true });
  try {
    drawDocument(await ask("document", { ...answer.question, document: hit.document }), answer, hit);
  } catch (error) {
    const told = make("div", { className: "error", role: "alert" });
    tellError(error, told);
    $("reader-body").replaceChildren(told);
  }
}

function drawDocument(found, answer, hit) {
  const named = (looks[answer.record.verdict] || looks[""]).named && hit.above_line !== false;
  const text = Array.from(found.text); // places are counted in characters, not in halves of them
  const segments = segmentsOf(found, text);
  const longest = Math.max(0, ...found.overlaps.map(each => each.words));
  const words = found.overlaps.length
    ? `${found.overlaps.length} run${found.overlaps.length > 1 ? "s" : ""} of words stand in prompt and response `
      + `too, the longest of ${longest}. `
    : "No run of words stands in prompt and response too. ";
  const largest = Math.max(...segments.map(each => Math.abs(each.influence)), 1e-300);
  const rows = segments.flatMap(segment => [
    make("p", { className: "text" }, ...marked(text, segment, found.overlaps)),
    make("div", { className: "number" },
      make("div", { className: `bar ${named ? (segment.influence >= 0 ? "supports" : "opposes") : ""}`,
        width: `${(100 * Math.abs(segment.influence) / largest).toFixed(1)}%` }),
      make("span", {}, segment.influence ? influence(segment.influence, answer.record.unit) : "no influence"),
      segment.held ? make("div", { className: "faint" }, `${percent(segment.held)} of it in the highlighted part`)
        : null)]);
  const record = answer.record;
  $("reader-body").replaceChildren(
    make("p", { className: "said" }, record.prompt, make("b", {}, record.response), record.cut ? "…" : ""),
    make("p", {}, `${words}Influence of the whole document: ${influence(found.influence, answer.record.unit)}.`),
    make("p", { className: "faint key" }, make("span", {}, make("mark", {}, "verbatim"), " in prompt or response"),
      make("span", {}, make("span", { className: "carry" }, "highlighted"), " carries most of the influence")),
    make("div", { className: "two" }, ...rows),
    found.stored ? "" : make("p", { className: "faint" }, "The index keeps no texts: this is decoded from tokens."));
  $("reader-body").focus();
}

function segmentsOf(found, text) {
  // where each chunk stands in the document; one segment where a chunk's text is not in it as it is
  const whole = [{ start: 0, stop: text.length, influence: found.influence || 0, carries: null, held: null }];
  const segments = [];
  let from = 0;
  for (const chunk of found.chunks) {
    const core = chunk.text.trim();
    const unit = found.text.indexOf(core, from);
    if (unit < 0 || !core) return whole;
    const start = Array.from(found.text.slice(0, unit)).length;
    const lead = Array.from(chunk.text.slice(0, chunk.text.indexOf(core))).length;
    const carries = chunk.carries && chunk.carries.map(place => place - lead + start);
    segments.push({ start, stop: text.length, influence: chunk.influence || 0, carries, held: chunk.held });
    from = unit + core.length;
  }
  if (!segments.length) return whole;
  segments[0].start = 0;
  segments.forEach((segment, at) => { if (at) segments[at - 1].stop = segment.start; });
  return segments;
}

function marked(text, segment, overlaps) {
  const inside = (place, spans) => spans.some(([start, stop]) => start <= place && place < stop);
  const same = overlaps.map(each => [each.start, each.stop]);
  const carry = segment.carries ? [segment.carries] : [];
  const edges = new Set([segment.start, segment.stop]);
  for (const span of [...same, ...carry]) {
    for (const place of span) if (place > segment.start && place < segment.stop) edges.add(place);
  }
  const places = [...edges].sort((a, b) => a - b);
  return places.slice(0, -1).map((start, at) => {
    const piece = text.slice(start, places[at + 1]).join("");
    const words = inside(start, same) ? make("mark", {}, piece) : piece;
    return inside(start, carry) ? make("span", { className: "carry" }, words) : words;
  });
}

/* ---- saving, links ---- */

async function save(answer, form) {
  try {
    const blob = await (await request("export", { ...answer.question, format: form })).blob();
    const link = make("a", { href: URL.createObjectURL(blob), download: `answer.${form}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    say(`Saved answer.${form}.`);
  } catch (error) {
    tellError(error, answer.told);
  }
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    say("The link is copied. It opens this answer for whoever may ask this server, after a restart too.");
  } catch {
    say("The address of this page is the link.");
  }
}

/* ---- verification ---- */

function drawVerification(answer) {
  const above = answer.record.hits.filter(hit => hit.above_line && hit.influence > 0);
  const tested = above.length ? above : answer.record.hits.slice(0, 1);
  const wanted = tested.map(hit => hit.document);
  if (!wanted.length) return null;
  const field = (name, value) => {
    const input = make("input", { type: "number", min: "1", max: "1000", value, id: `${name}-${Date.now()}-${Math.random()}` });
    return [make("div", { className: "field small" }, make("label", { htmlFor: input.id }, name), input), input];
  };
  const [seedsField, seeds] = field("Seeds", "5"), [randomField, random] = field("Random sets", "5");
  const which = wanted.length === 1 ? titleOf(tested[0]) : `the ${wanted.length} documents above the line`;
  const begin = make("button", { type: "button" }, "Verify: train again without it");
  const cancel = make("button", { type: "button", hidden: true }, "Cancel");
  const bar = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Models that are trained" });
  const told = make("p", { role: "status" });
  const drawn = make("div");
  const cost = make("span", { className: "faint" });
  const estimate = () => {
    const models = Number(seeds.value) * (2 + Number(random.value));
    cost.textContent = `trains ${models} models${answer.seconds ? `, about ${lasting(answer.seconds * models)}` : ""}`;
  };
  estimate();
  [seeds, random].forEach(each => each.addEventListener("input", estimate));
  answer.estimated = ({ seconds }) => { answer.seconds = seconds; estimate(); };
  let job = null;
  begin.addEventListener("click", async () => {
    begin.disabled = true;
    told.className = "";
    told.textContent = "Starting …";
    drawn.replaceChildren();
    try {
      job = await ask("verify", { ...answer.question, documents: wanted, seeds: Number(seeds.value),
        random: Number(random.value) });
      cancel.hidden = bar.hidden = false;
      await follow(job.id, bar, told, drawn);
    } catch (error) {
      tellError(error, told);
    } finally {
      begin.disabled = false;
      cancel.hidden = bar.hidden = true;
    }
  });
  cancel.addEventListener("click", () => {
    cancel.disabled = true;
    request(`verify/${job.id}`, null, { method: "DELETE" }).catch(error => tellError(error, told))
      .finally(() => { cancel.disabled = false; });
  });
  return make("div", { className: "verify" },
    make("div", { className: "buttons" }, begin, cost, cancel), bar, told, drawn,
    make("details", {}, make("summary", { className: "faint" }, "What is trained"),
      make("p", { className: "faint" }, `For every seed a model with all documents, one without ${which}, and some without `
        + "as many random ones of like length. Models that are trained are kept."),
      make("div", { className: "fields" }, seedsField, randomField)));
}

function lasting(seconds) {
  // as `stride_cli.output.duration`
  const [size, unit] = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]]
    .find(([size]) => seconds >= 1.5 * size || size === 1);
  const count = Math.max(1, Math.round(seconds / size));
  const rounded = count < 10 ? count : 10 * Math.round(count / 10);
  return `${rounded} ${unit}${rounded === 1 ? "" : "s"}`;
}

function drawInterval(record) {
  // the rise of the loss without the documents, beyond that without random ones: its interval beside zero
  const { mean, low, high } = record.difference;
  if (low === null) return [];
  const ends = [0, record.effect, low, high], least = Math.min(...ends), most = Math.max(...ends);
  const [left, right, y] = [20, 480, 34];
  const x = value => left + (right - left) * (value - least) / (most - least);
  const short = value => `${value > 0 ? "+" : ""}${Number(value.toPrecision(3))}`;
  const shape = (name, about, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(about)) node.setAttribute(key, String(value));
    if (text) node.textContent = text;
    return node;
  };
  const line = (value, kind, name, anchor) => [
    shape("line", { class: kind, x1: x(value), x2: x(value), y1: 14, y2: 54 }),
    shape("text", { class: "faint", x: x(value), y: 70, "text-anchor": anchor }, name)];
  const apart = x(record.effect) - x(0) > 90;
  const plot = shape("svg", { viewBox: "0 0 500 76", role: "img", class: record.verdict,
    "aria-label": `rise of the loss ${short(mean)}, ${short(low)} to ${short(high)} nats a token; 0 is no effect` });
  plot.append(...line(0, "zero", "no effect", x(0) < 60 ? "start" : "middle"),
    ...(apart ? line(record.effect, "ceiling", "would matter", x(record.effect) > 430 ? "end" : "middle") : []),
    shape("line", { class: "interval", x1: x(low), x2: x(high), y1: y, y2: y }),
    shape("circle", { class: "mean", cx: x(mean), cy: y, r: 7 }),
    shape("text", { x: Math.min(Math.max(x(mean), 140), 360), y: 12, "text-anchor": "middle" },
      `${short(mean)} nats a token (${short(low)} … ${short(high)})`));
  return [plot];
}

async function follow(id, bar, told, drawn) {
  const answer = await request(`verify/${id}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const begun = Date.now();
  let rest = "";
  let last = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const kind = event.match(/^event: (.*)$/m)[1];
      const record = JSON.parse(event.match(/^data: (.*)$/m)[1]);
      if (kind === "progress" && record.state === "running") {
        if (record.total) { bar.max = record.total; bar.value = record.done; }
        const count = record.total ? `${record.done} of ${record.total} models: ` : "";
        last = `${count}${record.message}`;
        told.textContent = last;
      } else if (kind === "alive") {
        told.textContent = `${last}, ${Math.round((Date.now() - begun) / 1000)} s so far`;
      } else if (kind === "result") {
        told.textContent = record.sentence;
        told.className = `judged ${record.verdict}`;
        drawn.replaceChildren(...drawInterval(record));
      } else if (kind === "error") {
        tellError(record, told);
        told.className = "error";
      } else if (kind === "end" && record.state === "cancelled") {
        told.textContent = record.message;
      }
    }
  }
}

/* ---- beginning ---- */

async function followAddress() {
  const questions = readAddress();
  $("empty").hidden = questions.length > 0;
  if (!questions.length) {
    answers.length = 0;
    draw();
    return;
  }
  following = true;
  answers.length = 0;
  toForm(questions[0][0]);
  try {
    for (const [at, [question, words]] of questions.entries()) await put(question, at, words);
  } finally {
    following = false;
    writeAddress();
  }
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  put(fromForm(), 0);
});
$("beside").addEventListener("click", () => {
  if ($("ask").reportValidity()) put(fromForm(), 1);
});
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("index").addEventListener("change", offerChat);
$("forget").addEventListener("click", () => { sessionStorage.removeItem(KEPT); drawHistory(); });
$("reader-close").addEventListener("click", () => $("reader").close());
addEventListener("hashchange", followAddress);

(async () => {
  try {
    drawHistory();
    served = (await ask("indexes")).indexes;
    $("index").replaceChildren(...served.map(each => make("option", { value: each.name }, each.name)));
    offerChat();
    $("served").textContent = served.map(each => `${each.name}: ${each.documents.toLocaleString("en")} documents`).join("; ");
    $("questions").replaceChildren(...served.flatMap(each => each.questions.map(prompt => make("li", {},
      make("button", { type: "button", className: "plain", onclick: () => {
        toForm({ prompt, index: each.name, top: 10, bottom: 0 });
        put(fromForm(), 0);
      } }, prompt)))).slice(0, 3));
    await followAddress();
    if (!answers.length) $("prompt").focus();
  } catch (error) {
    tellError(error);
  }
})();
