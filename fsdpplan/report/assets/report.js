"use strict";
// Draws the page's charts, and draws them again where the window, the look or the paper asks for it.
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const drawn = new Map();
  const PAPER_WIDTH = 640; // of A4 between its margins, in pixels of 96 an inch, less a card's padding

  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.look ? root.dataset.look === "dark" : prefersDark.matches);
  let printing = false;

  function look(box) {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    const dark = isDark() && !printing;
    const paper = {ink: "#1d2430", quiet: "#4a5462", line: "#cfd4db", faint: "#eef0f3", card: "#ffffff"};
    const screen = {ink: of("--ink"), quiet: of("--quiet"), line: of("--line"), faint: of("--faint"), card: of("--card")};
    return {
      ...(printing ? paper : screen),
      dark, printed: printing, colors: dark ? charts.DARK : charts.LIGHT,
      decal: dark ? "rgba(0,0,0,.28)" : "rgba(255,255,255,.45)",
      font: getComputedStyle(document.body).fontFamily,
      width: printing ? PAPER_WIDTH : Math.max(box.clientWidth, 200),
    };
  }

  const chosen = new Map(); // of charts that have several drawings
  function choiceOf(one, box) {
    if (!one.data.choices) return one.data;
    if (!chosen.has(one.name)) {
      chosen.set(one.name, one.data.chosen || 0);
      const label = document.createElement("label");
      label.className = "choice screen-only";
      label.append("Shown: ");
      const list = document.createElement("select");
      one.data.choices.forEach((choice, index) => list.add(new Option(choice.name, index)));
      list.value = String(chosen.get(one.name));
      list.addEventListener("change", () => { chosen.set(one.name, Number(list.value)); draw(one); });
      label.append(list);
      const onPaper = document.createElement("p");
      onPaper.className = "paper-only";
      box.before(label, onPaper);
    }
    const choice = one.data.choices[chosen.get(one.name)];
    box.previousElementSibling.textContent = choice.name;
    return choice;
  }

  function draw(one) {
    const box = document.getElementById("chart-" + one.name);
    const own = look(box);
    const {height, option, renderer} = charts.kinds[one.kind](choiceOf(one, box), own);
    const known = drawn.get(one.name);
    if (known) known.dispose();
    box.style.height = height + "px";
    const chart = echarts.init(box, null, {
      renderer: renderer || "svg", width: own.width, height, devicePixelRatio: own.printed ? 3 : undefined,
    });
    chart.setOption(option);
    drawn.set(one.name, chart);
  }
  function drawAll() {
    for (const one of data.charts) {
      if (charts.kinds[one.kind]) draw(one);
      else if (charts.drawings && charts.drawings[one.kind]) {
        charts.drawings[one.kind](document.getElementById("chart-" + one.name), one.data, look);
      }
    }
    root.dataset.drawn = "true"; // for whoever waits for it: a test, a printer
  }

  const button = document.getElementById("look");
  function labelled() {
    button.setAttribute("aria-pressed", String(isDark()));
    button.textContent = isDark() ? "Light" : "Dark";
  }
  button.addEventListener("click", () => {
    root.dataset.look = isDark() ? "light" : "dark";
    labelled();
    drawAll();
  });
  prefersDark.addEventListener("change", () => { labelled(); drawAll(); });
  document.getElementById("print").addEventListener("click", () => window.print());
  window.addEventListener("beforeprint", () => { printing = true; drawAll(); });
  window.addEventListener("afterprint", () => { printing = false; drawAll(); });

  let width = window.innerWidth, waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width || printing) return; // a phone's bars come and go
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });

  // Which section is read, in the list of them.
  const links = new Map([...document.querySelectorAll("nav a")].map((one) => [one.hash.slice(1), one]));
  const watcher = new IntersectionObserver((seen) => {
    for (const one of seen) {
      if (!one.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(one.target.id).setAttribute("aria-current", "true");
    }
  }, {rootMargin: "-10% 0px -80% 0px"});
  for (const one of document.querySelectorAll("main > section")) watcher.observe(one);

  labelled();
  drawAll();
})();
