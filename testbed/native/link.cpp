// The Python module testbed._link: channels, and the loop that forwards packets between TUN devices.
// testbed/network/channels.py and testbed/network/tunlink.py are its only callers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <stdexcept>

#include "channels.hpp"

namespace nb = nanobind;

namespace tpi {
namespace {

constexpr int kBurst = 32;       // packets read from one device before the others get their turn
constexpr double kSlack = 20e-6; // packets due within this many seconds are delivered early, to save a wake-up
constexpr double kNap = 1.0;      // longest sleep in seconds, after which signals are checked
constexpr size_t kLargest = 65536 + 64;

double monotonic() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Totals of a link since it was last reset.
struct Traffic {
    uint64_t packets = 0, sent_bytes = 0, wakeups = 0;
    uint64_t refused = 0;                      // packets that the receiving device did not accept
    double late_seconds = 0, late_worst = 0;   // delay after the due time: sum over packets, and maximum
};

class Link {
public:
    // `tuns` are non-blocking descriptors of the devices' TUN devices, `addresses` their IPv4 addresses in network byte
    // order. Each packet follows a header of `header` bytes, which does not count as traffic.
    Link(Emulator& emulator, std::vector<int> tuns, std::vector<uint32_t> addresses, size_t header)
        : emulator_(emulator), tuns_(std::move(tuns)), addresses_(std::move(addresses)), header_(header) {
        if (tuns_.size() != emulator.devices() || addresses_.size() != emulator.devices())
            throw std::invalid_argument("a link needs one TUN device and one address per device");
    }

    // Forwards packets until one of the descriptors `others` is readable, and returns it.
    int serve(const std::vector<int>& others) {
        std::vector<pollfd> watched;
        for (int descriptor : tuns_) watched.push_back({descriptor, POLLIN, 0});
        for (int descriptor : others) watched.push_back({descriptor, POLLIN, 0});
        nb::gil_scoped_release unlocked;
        for (;;) {
            sleep_until(emulator_.next_event(), watched);
            double now = monotonic();
            deliver(now);
            for (size_t i = 0; i < tuns_.size(); ++i)
                if (watched[i].revents) read(i, now);
            deliver(now);
            ++traffic.wakeups;
            for (size_t i = tuns_.size(); i < watched.size(); ++i)
                if (watched[i].revents) return watched[i].fd;
        }
    }

    Traffic traffic;
    double compensation = 0;  // seconds between the sending of a packet and its reading, caused by the wake-up

private:
    void sleep_until(double when, std::vector<pollfd>& watched) {
        double wait = std::clamp(when - monotonic(), 0.0, kNap), whole = std::floor(wait);
        timespec timeout{static_cast<time_t>(whole), static_cast<long>((wait - whole) * 1e9)};
        if (ppoll(watched.data(), watched.size(), &timeout, nullptr) < 0) {
            if (errno != EINTR) fail("wait");
            for (pollfd& each : watched) each.revents = 0;
        }
        nb::gil_scoped_acquire locked;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }

    [[noreturn]] static void fail(const char* what) {
        throw std::runtime_error(std::string("the link cannot ") + what + ": " + std::strerror(errno));
    }

    void read(size_t source, double now) {
        for (int i = 0; i < kBurst; ++i) {
            ssize_t size = ::read(tuns_[source], buffer_, sizeof buffer_);
            if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;  // no packet is left
            if (size < 0) fail("read from a TUN device");
            if (size < static_cast<ssize_t>(header_ + 20)) continue;
            uint32_t address;
            std::memcpy(&address, buffer_ + header_ + 16, sizeof address);
            auto found = std::find(addresses_.begin(), addresses_.end(), address);
            auto target = static_cast<size_t>(found - addresses_.begin());
            if (target < addresses_.size() && target != source)
                emulator_.send(now - compensation, source, target, Packet(buffer_, buffer_ + size));
        }
    }

    void deliver(double now) {
        emulator_.due(now, kSlack, [&](const Arrival& arrival) {
            if (::write(tuns_[arrival.target], arrival.packet.data(), arrival.packet.size()) < 0) {
                ++traffic.refused;  // the packet is dropped, as a real network card would do
                return;
            }
            ++traffic.packets;
            traffic.sent_bytes += arrival.packet.size() - header_;
            traffic.late_seconds += now - arrival.due;
            traffic.late_worst = std::max(traffic.late_worst, now - arrival.due);
        });
    }

    Emulator& emulator_;
    std::vector<int> tuns_;
    std::vector<uint32_t> addresses_;
    size_t header_;
    uint8_t buffer_[kLargest];
};

nb::list due(Emulator& emulator, double now, double slack) {
    nb::list arrived;
    emulator.due(now, slack, [&](const Arrival& arrival) {
        nb::bytes packet(arrival.packet.data(), arrival.packet.size());
        arrived.append(nb::make_tuple(arrival.due, arrival.target, packet));
    });
    return arrived;
}

void send(Emulator& emulator, double now, size_t source, size_t target, nb::bytes packet) {
    const auto* data = reinterpret_cast<const uint8_t*>(packet.c_str());
    emulator.send(now, source, target, Packet(data, data + packet.size()));
}

}  // namespace
}  // namespace tpi

NB_MODULE(_link, m) {
    using namespace tpi;
    nb::class_<Channel>(m, "Channel")
        .def_rw("latency", &Channel::latency)
        .def_rw("seconds_per_byte", &Channel::seconds_per_byte)
        .def_rw("cut", &Channel::cut);
    nb::class_<Emulator>(m, "Emulator")
        .def(nb::init<size_t, uint64_t>(), nb::arg("devices"), nb::arg("seed"))
        .def("add_channel", &Emulator::add_channel)
        .def("channel", &Emulator::channel, nb::rv_policy::reference_internal)
        .def("add_route", &Emulator::add_route)
        .def("send", &send)
        .def("due", &due)
        .def("next_event", &Emulator::next_event)
        .def_prop_ro("dropped", &Emulator::dropped);
    nb::class_<Traffic>(m, "Traffic")
        .def(nb::init<>())
        .def_ro("packets", &Traffic::packets)
        .def_ro("sent_bytes", &Traffic::sent_bytes)
        .def_ro("wakeups", &Traffic::wakeups)
        .def_ro("refused", &Traffic::refused)
        .def_ro("late_seconds", &Traffic::late_seconds)
        .def_ro("late_worst", &Traffic::late_worst);
    nb::class_<Link>(m, "Link")
        .def(nb::init<Emulator&, std::vector<int>, std::vector<uint32_t>, size_t>(), nb::keep_alive<1, 2>())
        .def("serve", &Link::serve)
        .def_rw("traffic", &Link::traffic)
        .def_rw("compensation", &Link::compensation);
}
