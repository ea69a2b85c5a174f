"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const short = (x) => x === undefined ? "–" : String(Number(x.toPrecision(3))).replace(/-/g, "−");

  document.querySelectorAll(".chart").forEach((figure) => {
    const { lines, box, limits } = data[Number(figure.dataset.chart)];
    const plot = figure.querySelector(".plot");
    const svg = plot.querySelector("svg");
    const at = figure.querySelector(".at b");
    const values = [...figure.querySelectorAll(".lines b")];
    const known = lines.map((line) => new Map(line));
    const steps = [...new Set(lines.flatMap((line) => line.map(([step]) => step)))].sort((a, b) => a - b);
    const { width, height } = svg.viewBox.baseVal;
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("y1", "0");
    cursor.setAttribute("y2", String(height - 15));
    cursor.setAttribute("visibility", "hidden");
    svg.append(cursor);
    let place = steps.length - 1;

    const show = (index, visible) => {
      place = index;
      const step = steps[index];
      at.textContent = step;
      values.forEach((value, i) => { value.textContent = short(known[i].get(step)); });
      const x = width * (box[0] + (box[1] - box[0]) * (step - limits[0]) / (limits[1] - limits[0]));
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("visibility", visible ? "visible" : "hidden");
    };
    const leave = () => {
      show(steps.length - 1, false);
      values.forEach((value, i) => { value.textContent = short(lines[i][lines[i].length - 1][1]); });
    };
    const nearest = (clientX) => {
      const frame = svg.getBoundingClientRect();
      const share = ((clientX - frame.left) / frame.width - box[0]) / (box[1] - box[0]);
      const step = limits[0] + share * (limits[1] - limits[0]);
      let low = 0, high = steps.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (steps[middle] <= step) low = middle; else high = middle;
      }
      return step - steps[low] <= steps[high] - step ? low : high;
    };
    plot.addEventListener("pointermove", (e) => show(nearest(e.clientX), true));
    plot.addEventListener("pointerdown", (e) => show(nearest(e.clientX), true));
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("focus", () => show(place, true));
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (e) => {
      const last = steps.length - 1;
      const next = {
        ArrowRight: Math.min(place + 1, last), ArrowLeft: Math.max(place - 1, 0), Home: 0, End: last,
      }[e.key];
      if (next === undefined || e.altKey || e.ctrlKey || e.metaKey) return;
      e.preventDefault();
      show(next, true);
    });
  });
})();
