// What a page does beyond being read: tooltips at once, tables that sort, one class at a time, a threshold to move.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, content) => Object.assign(document.createElement(name), { textContent: content });

  // Tooltips: those of figures are <title> elements, which browsers show late and plain.
  for (const title of all("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  const tip = make("div", "");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  document.addEventListener("pointermove", (event) => {
    const over = event.target.closest && event.target.closest("[data-tip]");
    tip.hidden = !over;
    if (!over) return;
    tip.textContent = over.dataset.tip;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + "px";
    tip.style.top = (event.clientY + 24 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
  });
  document.addEventListener("pointerleave", () => { tip.hidden = true; });

  // Tables that sort by a click on a head.
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      const button = make("button", head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.dataset.sorted !== "down";
        heads.forEach((other) => delete other.dataset.sorted);
        head.dataset.sorted = down ? "down" : "up";
        const value = (row) => row.cells[column].textContent.replace("−", "-").replace(/,/g, "");
        const number = (row) => parseFloat(value(row));
        const rows = all("tbody tr", table);
        const numeric = rows.every((row) => !Number.isNaN(number(row)));
        rows.sort((a, b) => (numeric ? number(a) - number(b) : value(a).localeCompare(value(b))) * (down ? -1 : 1));
        table.tBodies[0].append(...rows);
      });
    });
  }

  // One class at a time, chosen by name.
  const chips = document.getElementById("chips");
  if (chips) {
    const folds = all("details.class");
    const show = (chosen) => {
      folds.forEach((fold, index) => { fold.hidden = index !== chosen; fold.open = true; });
      all("button", chips).forEach((chip, index) => chip.setAttribute("aria-pressed", index === chosen));
    };
    folds.forEach((fold, index) => {
      const chip = make("button", fold.querySelector("b").textContent);
      chip.addEventListener("click", () => show(index));
      chips.append(chip);
    });
    chips.hidden = false;
    document.body.classList.add("chosen");
    show(0);
    addEventListener("beforeprint", () => folds.forEach((fold) => { fold.hidden = false; }));
  }

  // The command, ready to paste.
  for (const box of all(".copy")) {
    const button = make("button", "copy");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(box.querySelector("pre").textContent);
      button.textContent = "copied";
    });
    box.append(button);
  }

  // The threshold: counts at every hundredth, so that the numbers are those that the scores would give.
  const counts = document.getElementById("counts");
  if (!counts) return;
  const { classes, present, predicted, found, threshold, own } = JSON.parse(counts.textContent);
  const slider = document.getElementById("threshold");
  const chooser = document.getElementById("class");
  const percent = (part, total) => (100 * part) / Math.max(total, 1);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const at = (step, only) => {
    const columns = only === null ? classes.map((_, index) => index) : [only];
    const mean = (value) => sum(columns.map(value)) / columns.length;
    const hits = sum(columns.map((c) => found[c][step]));
    const called = sum(columns.map((c) => predicted[c][step]));
    const there = sum(columns.map((c) => present[c]));
    return {
      CP: mean((c) => percent(found[c][step], predicted[c][step])),
      CR: mean((c) => percent(found[c][step], present[c])),
      CF1: mean((c) => percent(2 * found[c][step], predicted[c][step] + present[c])),
      OP: percent(hits, called),
      OR: percent(hits, there),
      OF1: percent(2 * hits, called + there),
    };
  };
  const chosen = () => (chooser.value === "" ? null : Number(chooser.value));
  const scales = ({ left, right, top, bottom }) => [
    (value) => Number(left) + (right - left) * value,
    (value) => bottom - ((bottom - top) * value) / 100,
  ];
  const names = ["CP", "CR", "CF1", "OF1"];
  const draw = () => {
    const points = predicted[0].map((_, step) => at(step, chosen()));
    for (const mark of all(".mark")) {
      const [x, y] = scales(mark.dataset);
      for (const name of names) {
        const line = points.map((point, step) => `${x(step / 100).toFixed(1)},${y(point[name]).toFixed(1)}`);
        mark.closest("svg").querySelector(".series-" + name).setAttribute("points", line.join(" "));
      }
    }
    const fitted = own.length && chosen() !== null ? own[chosen()].toFixed(2) : "";
    document.getElementById("own").textContent = fitted && `fitted on training images: ${fitted}`;
    move();
  };
  const move = () => {
    const value = slider.value / 100;
    const now = at(Number(slider.value), chosen());
    document.getElementById("threshold-value").textContent = value.toFixed(2);
    for (const [name, number] of Object.entries(now)) {
      document.getElementById("live-" + name).textContent = number.toFixed(1);
    }
    for (const mark of all(".mark")) {
      const [x, y] = scales(mark.dataset);
      mark.setAttribute("transform", `translate(${x(value)} 0)`);
      for (const name of names) {
        const dot = mark.closest("svg").querySelector(".dot-" + name);
        dot.setAttribute("cx", x(value));
        dot.setAttribute("cy", y(now[name]));
        dot.dataset.tip = `${name} ${now[name].toFixed(1)} at ${value.toFixed(2)}`;
      }
    }
  };
  classes.forEach((name, index) => chooser.append(Object.assign(make("option", name), { value: index })));
  slider.value = Math.round(100 * threshold);
  slider.addEventListener("input", move);
  chooser.addEventListener("change", draw);
  document.getElementById("try-threshold").hidden = false;
})();
