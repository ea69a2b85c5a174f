"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const el = (id) => document.getElementById(id);
  const panel = el("panel");
  const answers = [...document.querySelectorAll(".answer")];
  const tokens = answers.map((answer) => [...answer.children]);
  tokens.forEach((list, r) => list.forEach((span, i) => { span.place = [r, i]; }));
  let kept = null, shown = null, queued = null;

  const digits = (x, n = 3) => {
    if (typeof x === "string") return x;
    if (x < -1e29) return "−∞";
    const size = Math.abs(x);
    const text = size !== 0 && size < 1e-3 ? x.toExponential(n - 1) : x.toFixed(size < 10 ? n : Math.max(n - 1, 0));
    return text.replace(/-/g, "−");
  };
  const percent = (p) => typeof p === "string" ? p : p >= 0.0995 ? `${(100 * p).toFixed(1)} %`
    : p >= 0.00995 ? `${(100 * p).toFixed(2)} %` : p >= 1e-6 ? `${(100 * p).toPrecision(2)} %`
    : p > 0 ? `${(100 * p).toExponential(1).replace("-", "−")} %` : "0 %";

  const fill = (table, name, logProb, entropy, top, sampled) => {
    const caption = table.caption;
    caption.textContent = name;
    const small = document.createElement("small");
    small.textContent = `log p ${digits(logProb)} · entropy ${digits(entropy)}`;
    caption.append(small);
    const rows = top.map(([id, p]) => {
      const row = document.createElement("tr");
      const text = document.createElement("td");
      const share = document.createElement("td");
      text.textContent = text.title = data.texts[id];
      share.textContent = percent(p);
      share.style.setProperty("--share", `${100 * p}%`);
      if (id === sampled) row.className = "sampled";
      row.append(text, share);
      return row;
    });
    table.tBodies[0].replaceChildren(...rows);
  };

  const verdict = (ratio, logS, logT) => {
    if (typeof ratio === "string") return "These values are no numbers: the model diverged.";
    const change = `from ${percent(Math.exp(logS))} to ${percent(Math.exp(logT))}`;
    if (Math.abs(ratio) < 5e-4) return `The teacher agrees: ${percent(Math.exp(logS))}.`;
    const factor = Math.exp(Math.min(Math.abs(ratio), 30));
    const times = factor < 1.1 ? "" : `, ${ratio > 0 ? "×" : "÷"}\u00a0${factor < 1000 ? factor.toPrecision(3) : factor.toExponential(1)}`;
    return `The teacher ${ratio > 0 ? "raises" : "lowers"} it ${change}${times}.`;
  };

  const show = (span) => {
    if (span === shown) return;
    shown?.classList.remove("shown");
    shown = span;
    panel.querySelector(".empty").hidden = span !== null;
    panel.querySelector(".inspected").hidden = span === null;
    if (!span) return;
    span.classList.add("shown");
    const [r, i] = span.place;
    const [id, role, divergence, ratio, logS, logT, entropyS, entropyT, topS, topT] = data.rollouts[r][i];
    el("p-text").textContent = data.texts[id];
    el("p-place").textContent = `token ${i + 1} of ${tokens[r].length}, id ${id}`;
    el("p-scored").hidden = role !== "scored";
    if (role !== "scored") {
      el("p-verdict").textContent = role === "context" ? "Written by a tool or the environment: not scored." : "Not scored.";
      return;
    }
    el("p-verdict").textContent = verdict(ratio, logS, logT);
    el("p-divergence").textContent = digits(divergence, 4);
    el("p-ratio").textContent = (ratio > 0 ? "+" : "") + digits(ratio, 4);
    fill(el("p-student"), "Student", logS, entropyS, topS, id);
    fill(el("p-teacher"), "Teacher", logT, entropyT, topT, id);
  };
  const later = (span) => {
    if (queued === null) requestAnimationFrame(() => { const next = queued.span; queued = null; show(next); });
    queued = { span };
  };
  const keep = (span) => {
    const [r] = span.place;
    tokens[r].rover.tabIndex = -1;
    tokens[r].rover = span;
    span.tabIndex = 0;
    span.setAttribute("aria-selected", "true");
    if (kept && kept !== span) kept.removeAttribute("aria-selected");
    kept = span;
    later(span);
  };
  const lineAway = (list, i, step) => {
    const box = list[i].getBoundingClientRect();
    const middle = box.left + Math.min(box.width, 40) / 2;
    let best = -1, far = Infinity, line = null;
    for (let j = i + step; j >= 0 && j < list.length; j += step) {
      const other = list[j].getBoundingClientRect();
      if (Math.abs(other.top - box.top) < 4) continue;
      if (line === null) line = other.top;
      if (Math.abs(other.top - line) >= 4) break;
      const distance = Math.abs(other.left + Math.min(other.width, 40) / 2 - middle);
      if (distance < far) { far = distance; best = j; }
    }
    return best < 0 ? i : best;
  };

  answers.forEach((answer, r) => {
    const list = tokens[r];
    list.rover = list[0];
    answer.addEventListener("pointerover", (e) => { if (e.target.place && e.pointerType !== "touch") later(e.target); });
    answer.addEventListener("pointerleave", () => later(kept));
    answer.addEventListener("focusin", (e) => { if (e.target.place) keep(e.target); });
    answer.addEventListener("click", (e) => { if (e.target.place) { e.target.focus({ preventScroll: true }); keep(e.target); } });
    answer.addEventListener("keydown", (e) => {
      if (!e.target.place || e.altKey || e.ctrlKey || e.metaKey) return;
      const i = e.target.place[1], last = list.length - 1;
      const next = {
        ArrowRight: () => Math.min(i + 1, last), ArrowLeft: () => Math.max(i - 1, 0), Home: () => 0, End: () => last,
        ArrowDown: () => lineAway(list, i, 1), ArrowUp: () => lineAway(list, i, -1),
      }[e.key];
      if (!next) return;
      e.preventDefault();
      list[next()].focus();
    });
    answer.closest(".rollout").querySelectorAll("[data-token]").forEach((button) => button.addEventListener("click", () => {
      list[Number(button.dataset.token)].focus();
    }));
  });
  const colour = () => { document.body.dataset.by = el("by-divergence").checked ? "divergence" : "ratio"; };
  el("controls").addEventListener("submit", (e) => e.preventDefault());
  el("controls").addEventListener("change", colour);
  colour(); // a reloaded page keeps the choice

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((d) => { d.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((d) => { d.open = false; }));
})();
