"use strict";
// Shows the values under the pointer. Needs nothing but the data that each chart carries.
for (const chart of document.querySelectorAll("[data-plot]")) {
  const plot = JSON.parse(chart.dataset.plot);
  const make = (name) => {
    const made = document.createElement("div");
    made.className = name;
    made.hidden = true;
    chart.append(made);
    return made;
  };
  const cross = make("cross");
  const tip = make("tip");
  const spots = plot.curves.map((curve) => make("spot c" + curve.color));
  const all = [cross, tip, ...spots];
  const say = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
  const nearest = (points, at) => {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] > at) high = middle;
      else low = middle;
    }
    return Math.abs(points[high][0] - at) > Math.abs(points[low][0] - at) ? points[low] : points[high];
  };
  const show = (event) => {
    const box = chart.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width;
    const found = plot.curves.map((curve) => (curve.points.length ? nearest(curve.points, at) : null));
    const best = found.reduce((a, b) => (!a ? b : !b ? a : Math.abs(b[0] - at) >= Math.abs(a[0] - at) ? a : b), null);
    if (!best) return;
    cross.style.left = 100 * best[0] + "%";
    tip.replaceChildren(plot.x + " " + say(best[2]));
    found.forEach((point, i) => {
      const far = !point || Math.abs(point[0] - best[0]) > 0.02;
      spots[i].hidden = far;
      if (far) return;
      spots[i].style.left = 100 * point[0] + "%";
      spots[i].style.top = 100 * point[1] + "%";
      const line = document.createElement("div");
      const key = document.createElement("i");
      key.className = "key c" + plot.curves[i].color;
      const value = document.createElement("b");
      value.textContent = say(point[3]) + (plot.unit ? " " + plot.unit : "");
      line.append(key, plot.curves[i].name + " ", value);
      tip.append(line);
    });
    cross.hidden = tip.hidden = false;
    const right = best[0] > 0.5;
    tip.style.left = right ? "auto" : "calc(" + 100 * best[0] + "% + 12px)";
    tip.style.right = right ? "calc(" + 100 * (1 - best[0]) + "% + 12px)" : "auto";
  };
  const hide = () => all.forEach((part) => { part.hidden = true; });
  chart.addEventListener("pointermove", show);
  chart.addEventListener("pointerdown", show);
  chart.addEventListener("pointerleave", hide);
}
