// What scripts add to pages that work without them: the theme, times in words, choosing rows, and pages that stay fresh.
"use strict";
(() => {
  const root = document.documentElement;
  const themes = ["system", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("txbox-theme") || "system"; } catch { return "system"; } };
  const wear = (theme) => { if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme; };
  wear(stored());

  const unit = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
  const age = (s) => {
    let left = Math.floor(Math.abs(s)); const parts = [];
    for (const [name, size] of unit) { const n = Math.floor(left / size); left -= n * size; if (n || parts.length) parts.push(n ? n + name : ""); if (parts.length === 2) break; }
    return parts.filter(Boolean).join(" ") || "0s";
  };
  // how long ago; where times are compared, behind the time itself. The title has it in UTC and as it is here
  const tell = (within) => within.querySelectorAll("time[datetime]").forEach((time) => {
    const at = new Date(time.dateTime), s = (Date.now() - at) / 1000, words = s < 0 ? "in " + age(s) : age(s) + " ago";
    const utc = time.dataset.utc ||= time.title || time.textContent;
    time.textContent = time.closest(".at, th, p") ? `${utc} (${words})` : words;
    time.title = `${utc}, here ${at.toLocaleString()}`;
  });

  const choosing = () => document.querySelectorAll("form.rows").forEach((form) => {
    const boxes = [...form.querySelectorAll("input[name=pick]")], head = form.querySelector("thead .pick");
    const buttons = [...form.querySelectorAll("button[value$=' selected']")];
    const count = () => {
      const n = boxes.filter((box) => box.checked).length;
      buttons.forEach((button) => { button.disabled = !n; button.textContent = button.textContent.replace(/ (selected|\d+)…$/, n ? ` ${n}…` : " selected…"); });
      const all = head && head.querySelector("input"); if (all) { all.checked = n > 0 && n === boxes.length; all.indeterminate = n > 0 && n < boxes.length; }
    };
    if (head && boxes.length && !head.querySelector("input")) {
      const all = document.createElement("input"); all.type = "checkbox"; all.setAttribute("aria-label", "Choose all on this page");
      all.addEventListener("change", () => { boxes.forEach((box) => { box.checked = all.checked; }); count(); });
      head.replaceChildren(all);
    }
    let last = null;
    boxes.forEach((box, index) => box.addEventListener("click", (event) => {
      if (event.shiftKey && last !== null) boxes.slice(Math.min(last, index), Math.max(last, index) + 1).forEach((other) => { other.checked = box.checked; });
      last = index; count();
    }));
    count();
  });

  // charts: what is pointed at is told, arrows go from step to step, and a span that is drawn over leads to its messages
  const links = (svg) => [...svg.querySelectorAll("a")];
  const read = (link) => { link.closest("figure").querySelector(".read").textContent = link.querySelector("title").textContent; };
  let from = null;
  const span = (to) => {
    const all = links(from.closest("svg")), a = all.indexOf(from), b = all.indexOf(to);
    return b < 0 ? [] : all.slice(Math.min(a, b), Math.max(a, b) + 1);
  };
  const step = (event) => event.target.closest && event.target.closest(".chart a");
  const address = (link) => new URL(link.getAttribute("href"), location);
  document.addEventListener("pointermove", (event) => {
    const link = step(event); if (!link) return;
    read(link);
    if (from) { links(from.closest("svg")).forEach((other) => other.classList.remove("in")); span(link).forEach((other) => other.classList.add("in")); }
  });
  document.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = step(event); });
  document.addEventListener("pointerup", (event) => {
    const link = step(event), drawn = from && link ? span(link) : [];
    from = null;
    if (drawn.length < 2) return;
    const to = address(drawn[0]); to.searchParams.set("until", address(drawn[drawn.length - 1]).searchParams.get("until"));
    location.assign(to);
  });
  document.addEventListener("dragstart", (event) => { if (step(event)) event.preventDefault(); });
  document.addEventListener("focusin", (event) => { if (step(event)) read(event.target); });
  document.addEventListener("keydown", (event) => {
    const svg = event.target.closest && event.target.closest(".chart svg"); if (!svg) return;
    const all = links(svg), at = all.indexOf(event.target);
    const to = { ArrowLeft: at < 0 ? all.length - 1 : at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined && all[to]) { event.preventDefault(); all[to].focus(); }
  });

  // views of one's own: their addresses are kept in this browser
  const keep = () => {
    const nav = document.querySelector("[data-views]"); if (!nav) return;
    const key = "txbox-views" + location.pathname;
    let kept = []; try { kept = JSON.parse(localStorage.getItem(key)) || []; } catch { return; }
    const put = (views) => { try { localStorage.setItem(key, JSON.stringify(views)); } catch { /* for this page only */ } nav.querySelectorAll("[data-mine]").forEach((old) => old.remove()); kept = views; show(); };
    const button = (text, act) => { const made = document.createElement("button"); made.type = "button"; made.className = "quiet"; made.dataset.mine = ""; made.textContent = text; made.addEventListener("click", act); nav.append(made); return made; };
    const show = () => {
      kept.forEach(([name, search]) => {
        const link = document.createElement("a"); link.href = location.pathname + search; link.textContent = name; link.dataset.mine = "";
        nav.append(link);
        button("×", () => put(kept.filter((view) => view[0] !== name))).setAttribute("aria-label", `Forget the view ${name}`);
      });
      if (location.search) button("Save this view…", () => { const name = prompt("Name of this view"); if (name) put([...kept.filter((view) => view[0] !== name), [name, location.search]]); });
    };
    show();
  };

  // a page is asked for again and its regions are put in place, unless somebody is choosing or typing there
  let asking = false;
  const fresh = async (regions = "[data-region]") => {
    if (asking || from || document.hidden || !document.querySelector(regions)) return;
    asking = true;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" }, credentials: "same-origin" });
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.querySelectorAll(regions).forEach((region) => {
        const next = page.querySelector(`[data-region="${region.dataset.region}"]`);
        if (!next || region.contains(document.activeElement) && document.activeElement !== region) return;
        if (region.querySelector("input:checked, details[open]")) return;
        if ([...region.querySelectorAll("input:not([type=hidden])")].some((field) => field.value !== field.defaultValue)) return;
        if (next.innerHTML !== region.innerHTML) { region.replaceChildren(...next.childNodes); tell(region); }
      });
      choosing();
      if (!page.body.dataset.live) { const stream = root.stream; if (stream) stream.close(); }
    } catch { /* the next event asks again */ } finally { asking = false; }
  };

  document.addEventListener("DOMContentLoaded", () => {
    tell(document);
    setInterval(() => tell(document), 10000);
    choosing();
    keep();
    const toggle = document.querySelector("[data-theme-toggle]");
    if (toggle) {
      const say = () => { toggle.textContent = "Theme: " + stored(); };
      toggle.hidden = false; say();
      toggle.addEventListener("click", () => {
        const next = themes[(themes.indexOf(stored()) + 1) % themes.length];
        try { localStorage.setItem("txbox-theme", next); } catch { /* it lasts for this page */ }
        wear(next); say();
      });
    }
    const live = document.body.dataset.live;
    if (live && "EventSource" in window) {
      const stream = root.stream = new EventSource(live);
      stream.addEventListener("changed", () => fresh());
      stream.addEventListener("counted", () => fresh('[data-region="charts"], [data-region="rates"], [data-region="heat"]'));
      window.addEventListener("pagehide", () => stream.close());
      document.addEventListener("visibilitychange", () => { if (!document.hidden) fresh(); });
    }
    const keys = document.getElementById("keys"), help = document.querySelector("[data-keys]");
    if (keys && help) { help.hidden = false; help.addEventListener("click", () => keys.showModal()); }
    // ? to the list of keys, / to the first filter, g and a letter to a page
    let went = 0;
    const pages = { o: "/", m: "/messages", f: "/failures", q: "/quarantine", x: "/outbox", w: "/workers", d: "/database", a: "/audit" };
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
      if (keys && keys.open) return;
      if (event.key === "?" && keys) { event.preventDefault(); keys.showModal(); }
      else if (event.key === "/") { const first = document.querySelector(".filters input, .filters select"); if (first) { event.preventDefault(); first.focus(); } }
      else if (event.key === "g") went = Date.now();
      else if (pages[event.key] && Date.now() - went < 1000) {
        const brand = document.querySelector(".brand"); if (!brand) return;
        const link = document.querySelector(`.side a[href="${brand.getAttribute("href").replace(/\/$/, "") + pages[event.key]}"]`);
        if (link) link.click();
      }
    });
  });
})();
