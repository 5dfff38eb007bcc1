// The arithmetic of the user-space link: the time at which a packet that leaves one device arrives at another.
//
// Each direction of each link, and each shared medium, is a Channel. A packet is treated as a fluid: it flows on as it
// arrives, like the train of small packets that it would be on a real wire. So a 64 KiB packet over four equal links is
// serialised once and not four times. A packet that reaches a channel while an earlier one is being sent waits.
//
// Packets must enter a channel in the order in which they reach it, not in which they left their devices. So a packet's
// next hop is computed at its *commit time*: the time from which no packet that has yet to leave a device can reach
// that channel before it. On paths of equal latency that is at once. If it is later, it has no wake-up: the hop
// is computed together with the next event, and at the latest when the packet could arrive. So a packet costs about one
// timer for any number of hops.
//
// This file uses no clocks and no sockets: times are seconds, passed in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <queue>
#include <random>
#include <stdexcept>
#include <vector>

namespace tpi {

constexpr double kNever = std::numeric_limits<double>::infinity();
using Packet = std::vector<uint8_t>;

// One direction of a link, or a shared medium.
struct Channel {
    double latency, jitter, loss;  // seconds, seconds, fraction of packets
    double queue;                  // seconds of traffic that may wait; further packets are dropped
    double seconds_per_byte;
    bool cut = false;
    uint64_t dropped = 0;
    double lookahead = kNever;  // the least seconds that any packet takes from its device to this channel
    double free = 0;            // time at which all bits accepted so far will be sent
    double first = 0, last = 0; // times at which the first and last bit of the latest packet come out

    // Changes the times of a packet's first and last bit from when they reach the channel to when they come out.
    // Returns false if the packet is dropped: the channel is cut, its queue is full, or the packet is lost.
    bool cross(double& first_bit, double& last_bit, size_t size, std::mt19937_64& random) {
        std::uniform_real_distribution<double> even(0.0, 1.0);
        double start = std::max(free, first_bit);
        if (cut || start - first_bit > queue || (loss > 0 && even(random) < loss)) {
            ++dropped;
            return false;
        }
        free = start + static_cast<double>(size) * seconds_per_byte;
        double delay = jitter > 0 ? latency + jitter * (2 * even(random) - 1) : latency;
        first_bit = first = std::max(first, start + delay);
        last_bit = last = std::max(last, std::max(free, last_bit) + delay);
        return true;
    }
};

// The channels from one device to another, and the number of the device at its end.
struct Route {
    size_t target = 0;
    std::vector<Channel*> channels;
    std::vector<double> remaining;  // the least seconds from the start of each channel to the device, followed by a 0
};

struct Arrival {
    double due;
    size_t target;
    Packet packet;
};

// All packets under way in one emulated home. Devices are identified by numbers.
class Emulator {
public:
    Emulator(size_t devices, uint64_t seed) : devices_(devices), routes_(devices * devices), random_(seed) {}
    Emulator(const Emulator&) = delete;

    // Adds a channel. Returns its number.
    size_t add_channel(double bits, double latency, double jitter, double loss, double queue) {
        channels_.push_back({latency, jitter, loss, queue, 8 / bits});
        return channels_.size() - 1;
    }
    Channel& channel(size_t number) { return channels_.at(number); }
    size_t devices() const { return devices_; }

    // Sets the channels that packets from `source` to `target` cross, in order. Add all routes before the first packet.
    void add_route(size_t source, size_t target, const std::vector<size_t>& numbers) {
        Route& route = routes_.at(source * devices_ + target);
        route = {target, {}, {0.0}};
        double reached = 0;
        for (size_t number : numbers) {
            Channel& crossed = channel(number);
            route.channels.push_back(&crossed);
            crossed.lookahead = std::min(crossed.lookahead, reached);
            reached += crossed.latency - crossed.jitter;
        }
        for (size_t hop = route.channels.size(); hop-- > 0;)
            route.remaining.push_back(route.remaining.back() + route.channels[hop]->latency - route.channels[hop]->jitter);
        std::reverse(route.remaining.begin(), route.remaining.end());
    }

    // Sends `packet` from device `source` to `target` at `now`. Call due() with the same `now` first.
    void send(double now, size_t source, size_t target, Packet packet) {
        const Route& route = routes_.at(source * devices_ + target);
        if (target >= devices_ || route.remaining.empty()) throw std::out_of_range("no route between these devices");
        advance({now, ++number_, 0, now, now, &route, std::move(packet)}, now);
    }

    // Calls take(Arrival) for each packet that arrives by `now` + `slack` seconds, in order.
    template <class Take> void due(double now, double slack, const Take& take) {
        double horizon = now + slack;
        while (!events_.empty() && events_.front().when <= horizon) {
            std::pop_heap(events_.begin(), events_.end(), later);
            Event event = std::move(events_.back());
            events_.pop_back();
            if (event.hop == event.route->channels.size()) take({event.when, event.route->target, std::move(event.packet)});
            else advance(std::move(event), horizon);
        }
        while (!wakes_.empty() && wakes_.top() <= horizon) wakes_.pop();
    }

    // Returns the time at which due() has to be called next; infinity if no packet is under way.
    double next_event() const { return wakes_.empty() ? kNever : wakes_.top(); }

    // Returns the number of packets dropped by cut links, full queues and loss so far.
    uint64_t dropped() const {
        uint64_t all = 0;
        for (const Channel& channel : channels_) all += channel.dropped;
        return all;
    }

private:
    struct Event {
        double when;  // commit time
        uint64_t number;
        size_t hop;
        double first, last;  // times at which the packet's first and last bit reach that hop
        const Route* route;
        Packet packet;
    };
    static bool later(const Event& a, const Event& b) {
        return a.when != b.when ? a.when > b.when : a.number > b.number;
    }

    // Moves a packet over as many hops as precede the next hops of all other packets, and queues it for the rest.
    void advance(Event event, double now) {
        constexpr double kSame = 1e-9;  // seconds; sums of latencies differ in their last bits
        const Route& route = *event.route;
        double until = std::min(now, events_.empty() ? kNever : events_.front().when) + kSame;
        for (; event.hop < route.channels.size(); ++event.hop) {
            Channel& channel = *route.channels[event.hop];
            if (event.first - channel.lookahead > until) break;
            if (!channel.cross(event.first, event.last, event.packet.size(), random_)) return;
        }
        bool whole = event.hop == route.channels.size();
        event.when = whole ? event.last : event.first - route.channels[event.hop]->lookahead;
        wakes_.push(event.last + route.remaining[event.hop]);
        events_.push_back(std::move(event));
        std::push_heap(events_.begin(), events_.end(), later);
    }

    size_t devices_;
    std::deque<Channel> channels_;  // a deque, because routes point to its elements
    std::vector<Route> routes_;     // by source * devices + target
    std::vector<Event> events_;     // a heap, the earliest first
    std::priority_queue<double, std::vector<double>, std::greater<double>> wakes_;  // times at which packets may arrive
    std::mt19937_64 random_;
    uint64_t number_ = 0;
};

}  // namespace tpi
