// Keeps a page that `baton watch` serves up to date, and sends what its buttons ask for.
//
// The token is behind `#` in the address, which the browser keeps to itself; each request has it as a header.
(() => {
  "use strict";
  const headers = {Authorization: `Bearer ${location.hash.slice(1)}`};
  const live = document.getElementById("live"), notice = document.getElementById("notice");
  const base = location.pathname === "/" ? "" : location.pathname;
  const pause = seconds => new Promise(done => setTimeout(done, 1000 * seconds));

  function say(text, tone = "warn") {
    notice.textContent = text;
    notice.className = tone;
    notice.hidden = !text;
  }

  // Elements that are the same one in two states of the page.
  const key = node => node.nodeType !== 1 ? undefined
    : node.dataset.key ?? (node.matches("figure") ? node.ariaLabel
    : node.matches("section, details") ? node.querySelector("h2, summary")?.textContent.replace(/\d+/g, "") : undefined);
  const OURS = new Set(["open", "data-label", "data-empty", "hidden"]);  // attributes that this page's scripts set

  function morph(old, next) {  // makes an element equal to another, and touches only what differs
    if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName || key(old) !== key(next)) {
      old.replaceWith(next);
      if (next.nodeType === 1) batonPage.enhance(next);
      return;
    }
    if (old.nodeType !== 1) {
      if (old.data !== next.data) old.data = next.data;
      return;
    }
    if (old.matches("figure[data-plot]")) {
      if (old.dataset.plot !== next.dataset.plot) batonPage.figures.get(old).update(next.dataset.plot);
      for (const part of ["figcaption", ".legend"]) {
        const [was, is] = [old, next].map(figure => figure.querySelector(part));
        if (was && is) morph(was, is);
        else if (is) old.append(is);
        else was?.remove();
      }
      return;
    }
    for (const {name, value} of next.attributes)
      if (!OURS.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const {name} of [...old.attributes])
      if (!OURS.has(name) && !next.hasAttribute(name) && !(name === "class" && old.matches("table"))) old.removeAttribute(name);
    const keyed = new Map([...old.children].filter(key).map(child => [key(child), child]));
    let at = old.firstChild;
    for (const child of [...next.childNodes]) {
      const same = keyed.get(key(child));
      if (same && same !== at) old.insertBefore(same, at);
      const target = same ?? (at && key(at) ? null : at);
      if (target) {
        at = target.nextSibling;
        morph(target, child);
      } else {
        old.insertBefore(child, at);
        if (child.nodeType === 1) batonPage.enhance(child);
      }
    }
    while (at) {
      const gone = at;
      at = at.nextSibling;
      gone.remove();
    }
  }

  function take(kind, value) {
    if (kind === "trouble") return say(value, "bad");
    const next = document.createElement("div");
    next.id = "live";
    next.innerHTML = value;
    say("");
    morph(live, next);
    document.title = live.querySelector("h1")?.textContent ?? "Baton";
    for (const link of live.querySelectorAll("a[data-run]")) link.href = `/runs/${link.dataset.run}${location.hash}`;
    batonPage.tables.forEach(fit => fit());
  }

  async function follow() {
    for (;;) {
      try {
        const answer = await fetch(`${base}/events`, {headers});
        if (!answer.ok) return say((await answer.json()).error, "bad");
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let text = "";;) {
          const {value, done} = await reader.read();
          if (done) break;
          const events = (text + value).split("\n\n");
          text = events.pop();
          for (const event of events) {
            const fields = Object.fromEntries(event.split("\n").map(line => line.split(/: (.*)/s)));
            if (fields.event) take(fields.event, JSON.parse(fields.data));
          }
        }
      } catch (error) {
        if (!(error instanceof TypeError)) throw error;  // the connection's
      }
      say("The server does not answer. Start the command again, and open the address that it prints.");
      await pause(2);
    }
  }

  const dialog = document.getElementById("steer");
  const part = name => document.getElementById(`steer-${name}`);
  const WORDS = {
    stop: ["Stop", "It stops at its next chunk boundary, and another takes its place. Its newest checkpoint stays."],
    resume: ["Resume", "It comes back at the next rung, or the next chunk of a shared process, and trains to the end."],
    promote: ["Promote", "It advances at each rung whatever its place, and trains to the end."],
    clone: ["Clone", "A new trial starts at its newest checkpoint with these changes, and joins as a resumed one does."],
  };
  let asked = null;

  document.addEventListener("click", event => {
    const button = event.target.closest("button[data-act]");
    if (!button) return;
    const {act, trial, values} = button.dataset, [word, effect] = WORDS[act];
    asked = {action: act, trial};
    part("title").textContent = `${word} ${trial}`;
    part("effect").textContent = effect;
    part("go").textContent = word;
    part("why").hidden = act === "clone";
    part("changes").hidden = act !== "clone";
    part("error").hidden = true;
    dialog.querySelector("[name=why]").value = "";
    dialog.querySelector("[name=changes]").value = values ?? "";
    dialog.showModal();
  });

  part("cancel").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", async event => {
    event.preventDefault();
    const form = new FormData(event.target);
    const order = {...asked, why: form.get("why"), changes: []};
    if (asked.action === "clone") order.changes = form.get("changes").split("\n").map(line => line.trim()).filter(Boolean);
    part("go").disabled = true;
    try {
      const answer = await fetch("/steer", {method: "POST", headers, body: JSON.stringify(order)});
      const {told, error} = await answer.json();
      part("error").textContent = error ?? "";
      part("error").hidden = !error;
      if (told) {
        dialog.close();
        toast(told);
      }
    } catch {
      part("error").textContent = "The server does not answer.";
      part("error").hidden = false;
    } finally {
      part("go").disabled = false;
    }
  });

  function toast(text) {
    const shown = document.getElementById("told");
    shown.textContent = text;
    shown.hidden = false;
    clearTimeout(toast.end);
    toast.end = setTimeout(() => { shown.hidden = true; }, 10000);
  }

  follow();
})();
